"""Parallelism mechanisms: what each rank holds and computes of one model, and how the parts are combined."""
