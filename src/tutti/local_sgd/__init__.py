"""Replicas that differ between synchronisations: local SGD, DiLoCo, Adasum, gossip, elastic averaging."""
