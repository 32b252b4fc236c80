"""Pure cost functions: what a plan costs on a cluster. No torch, no clock, no files."""

from tutti.cost_model.step_time import predict

__all__ = ["predict"]
