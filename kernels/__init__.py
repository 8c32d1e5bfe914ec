"""The maths: topology, reference, sampling, and the PyTorch forms. Imports nothing else of this project."""
