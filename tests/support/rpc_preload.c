/* Gives an RPC server to any program that is linked against ggml, before its main(): LD_PRELOAD this library.
 *
 * The devices of DROVER_RPC_ENDPOINT appear as RPC0, RPC1, ...
 */
#include <stdio.h>
#include <stdlib.h>

void *ggml_backend_rpc_add_server(const char *endpoint);
void ggml_backend_register(void *backends);

__attribute__((constructor)) static void add_server(void) {
    const char *endpoint = getenv("DROVER_RPC_ENDPOINT");
    void *backends = endpoint ? ggml_backend_rpc_add_server(endpoint) : NULL;
    if (!backends) {
        fprintf(stderr, "rpc_preload: no server at DROVER_RPC_ENDPOINT\n");
        exit(1);
    }
    ggml_backend_register(backends);
}
