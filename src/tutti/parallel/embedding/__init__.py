"""Embedding parallelism: tables are divided over ranks, whole or by rows, and looked up with one exchange."""
