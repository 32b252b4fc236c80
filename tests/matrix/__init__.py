"""The matrix: model families by plans, every cell N ranks against one device."""
