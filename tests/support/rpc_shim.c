/* Gives an RPC server to llama.cpp tools that have no option for one.
 *
 * ggml loads one extra backend from GGML_BACKEND_PATH and calls its ggml_backend_init(). Ours is the stock RPC backend
 * (DROVER_RPC_LIBRARY) with one server (DROVER_RPC_ENDPOINT) added; its devices then appear as RPC0, RPC1, ...
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef void *(*add_server_function)(const char *endpoint);

void *ggml_backend_init(void) {
    const char *library = getenv("DROVER_RPC_LIBRARY");
    const char *endpoint = getenv("DROVER_RPC_ENDPOINT");
    if (!library || !endpoint) {
        fprintf(stderr, "rpc_shim: DROVER_RPC_LIBRARY and DROVER_RPC_ENDPOINT must be set\n");
        return NULL;
    }
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    add_server_function add_server = handle ? (add_server_function)dlsym(handle, "ggml_backend_rpc_add_server") : NULL;
    if (!add_server) {
        fprintf(stderr, "rpc_shim: %s\n", dlerror());
        return NULL;
    }
    return add_server(endpoint);
}
