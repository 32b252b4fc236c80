"""Updating the model: optimizers for large batches, learning-rate rules, and the 1-bit Adam family."""
