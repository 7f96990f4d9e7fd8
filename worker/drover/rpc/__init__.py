"""The ggml RPC protocol between coordinator and worker, as values and bytes. Pure: no sockets, threads or clocks.

Reading order: `messages` (what can be said), `versions` (what older clients say otherwise), `codec` (message <->
bytes), `framing` (bytes <-> frames, pull style), `connection` (hello first; who answers whom). Specification:
docs/protocol.md.
"""
