"""Embedding tables divided over ranks: whole tables or runs of rows, looked up by all ranks with one exchange."""
