"""Experts divided over ranks: every rank holds some of them, and tokens travel to the experts they chose."""
