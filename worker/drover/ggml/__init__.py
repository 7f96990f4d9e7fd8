"""What both ends mean by "tensor": types, operations, and the tensor record. Pure: no I/O, no numpy.

Reading order: `types`, `ops`, `tensor`.
"""
