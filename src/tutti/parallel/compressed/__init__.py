"""Gradients summed in fewer bytes: what a plan's `sync.compress` says, made to run over the buckets of a replica."""
