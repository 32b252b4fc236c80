"""Spatial parallelism: each rank computes its part of every activation of a sample, and neighbours exchange halos.

`SpatialTensor` behaves as the whole tensor and holds this rank's part. It refuses functions that it cannot compute
exactly. Along the space axis, the ranks' losses add up to `degree` times the loss, so each rank's backward
starts from 1 / degree. The backward of every exchange is its exact adjoint. Gradients are summed over space as
they are over data.
"""

from tutti.parallel.spatial.spatial_tensor import SpatialTensor, whole

__all__ = ["SpatialTensor", "whole"]
