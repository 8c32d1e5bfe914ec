"""The `specla` command."""
