"""Starts ranks, supervises them and reports why they failed; one file for each launcher."""
