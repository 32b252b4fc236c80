"""Verification: compare N ranks with one device, module by module; name the first difference and its likely cause."""
