"""How the model is updated: optimizers for large batches, learning-rate rules that follow the global batch."""
