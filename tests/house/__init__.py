"""The rules of the house as checkers: each takes source text and returns its findings as sentences."""
