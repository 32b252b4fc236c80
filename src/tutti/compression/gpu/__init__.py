"""The same codes on a GPU: Triton kernels that read a gradient once, and write its code and the new residual.

`kernels/` are Numba's, for one core; these have their names and their signatures, with tensors in place of arrays. A
program takes whole blocks and holds them in registers. Each computes bit for bit what its plain PyTorch reference
(beside the codec) computes, with one exception: sums of a block run in another order (mean |x|, the 2-norm), so those
scales may differ in their last bits, and all else is exact given the scale. So ranks decode the same bits whatever they
compute with. Nothing here is loaded before a tensor on a GPU asks for it: Triton comes with torch's CUDA wheels.
"""
