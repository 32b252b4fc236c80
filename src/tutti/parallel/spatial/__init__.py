"""One sample cut in space: each rank computes its part of every activation, and halos travel between neighbours.

`CutTensor` behaves as the whole tensor and holds this rank's part; what it cannot do exactly it refuses. Along the
space axis the sum over ranks of their losses is `degree` times the loss, so each rank's backward starts from
1 / degree, every exchange's backward is its exact adjoint, and all gradients are summed over space like over data.
"""

from tutti.parallel.spatial.spatial_tensor import CutTensor, whole

__all__ = ["CutTensor", "whole"]
