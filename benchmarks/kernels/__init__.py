"""`specla bench kernels`: the verification kernels and their rivals, timed in one run on a GPU."""
