"""Training data and models, by this project's own commands."""
