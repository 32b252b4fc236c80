"""Predictions against published measurements, row by row and family by family; and the fit of a cluster's constants."""
