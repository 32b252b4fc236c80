"""One pass over memory on one core: Numba kernels that read a gradient, and write its code and the new residual.

A kernel works block by block, so that what it reads twice is still in the first cache. Each computes bit for bit what
its plain PyTorch reference (beside the codec) computes: sums run in `LANES` lanes that are added up in a fixed tree,
and nothing is contracted or reordered. They hold no thread pool and no state: forked processes may use them, before
or after the parent did. They release the interpreter's lock.
"""
