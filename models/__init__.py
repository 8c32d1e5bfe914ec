"""The shipped target: `importlib.resources.files("specla.models")` holds its files, installed or in a checkout."""
