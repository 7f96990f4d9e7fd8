"""The coordinator: one GGUF model driven over ggml RPC workers, with an OpenAI-compatible API in front.

It knows models, tokens and sequences, and computes no tensor itself (one row of logits apart). Reading order:
`sequence`, `graph`, `architectures`, `arena`, `remote`, `loading`, `kv_cache`, `scheduler`, `pipeline`, `sampler`,
`engine`; then `assembly`, where the parts meet, and `__main__`, the flags.
"""
