"""Models built without memory: what their constructors do is recorded, and repeated for this rank's part alone."""
