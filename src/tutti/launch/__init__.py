"""Starting ranks, watching over them and saying why they failed; a file a launcher."""
