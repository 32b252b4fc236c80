"""A plan made to run: the Job, and one file for each mechanism."""
