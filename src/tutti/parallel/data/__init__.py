"""Data parallelism: replicas of the model whose gradients are reduced in buckets while backward still runs."""
