"""The drafters themselves, one a file."""
