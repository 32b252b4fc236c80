"""Replicas that step asynchronously: parameter servers, stale-synchronous, AD-PSGD, Hogwild and ensembles."""
