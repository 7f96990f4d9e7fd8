"""The worker: one process that owns devices and memory and obeys the ggml RPC protocol.

Reading order: `__main__` (flags, assembly), `server` (sockets and threads), `session` (what a client may ask), `memory`
(the one bounds check), `graph` (message to nodes), `store` (weights on disk; `entry` is one, `holds` knows which
are in use), `limits` (what a client may take), `machine` (what we may use of it), and `devices` (who computes).
"""
