"""Tests of the specs."""
