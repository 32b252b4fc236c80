"""Compressed gradient reduction: a plan's `sync.compress`, applied to the buckets of a replica."""
