"""How the optimizer is driven: learning-rate rules that follow the global batch."""
