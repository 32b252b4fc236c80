"""The rules of the house as checkers. Each takes source text and returns its findings as sentences."""
