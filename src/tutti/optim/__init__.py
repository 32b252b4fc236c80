"""How the model is updated: optimizers for large batches, learning-rate rules, and the rules of the 1-bit Adam
family."""
