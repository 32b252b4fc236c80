"""Triton kernels: one pass over a gradient on a GPU writes its code and the new residual.

The kernels have the names and signatures of those in `cpu_kernels`, with tensors instead of arrays. A program takes
whole blocks and keeps them in registers. Each kernel gives bit for bit the result of its plain PyTorch reference, with
one exception: sums over a block (mean |x|, the 2-norm) run in another order, so these scales may differ in their last
bits. Everything else is exact for a given scale, so all ranks decode the same bits on any device. Nothing here is
imported before a tensor on a GPU needs it, because Triton is installed only with torch's CUDA wheels.
"""
