"""A module of survive.py's own, which keeps something between imports."""

RUNS: list[int] = []
