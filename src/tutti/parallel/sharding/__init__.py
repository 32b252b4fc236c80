"""Sharding: model states divided among ranks (ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054)."""
