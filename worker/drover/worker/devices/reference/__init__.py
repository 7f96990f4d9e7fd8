"""The reference device: every operation in numpy, slow and plainly right; the definition the other devices are held to.

Reading order: `device`, `arrays`, `quants`, then the families of operations, which mirror `drover.ggml.rules`:
`movement`, `arithmetic`, `products`, `attention`, `recurrent`, `images`.
"""
