"""Verification: N ranks against one device, module by module; the first difference named with its likely cause."""
