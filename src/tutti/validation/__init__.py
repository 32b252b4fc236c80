"""Compare predictions with published measurements, row by row and family by family, and fit a cluster's constants."""
