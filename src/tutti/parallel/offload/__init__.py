"""Offload: what a rank keeps in its host's memory, and how it moves (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840).

The device computes with copies. The host holds the parameters in their own dtype, the gradients and the optimizer's
state, and updates them with torch's kernels for CPUs.
"""
