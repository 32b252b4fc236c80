"""The commands of tutti as functions: each takes what its command takes, returns values and raises TuttiError."""
