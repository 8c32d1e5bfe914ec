"""The `specla` command. A module here is imported only when its command runs, so that `--help` is quick."""
