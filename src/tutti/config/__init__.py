"""The specs: frozen, keyword-only dataclasses that round-trip through JSON by one codec."""
