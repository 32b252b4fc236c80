"""Modes of consistency: how far replicas may differ, and how they are brought together."""
