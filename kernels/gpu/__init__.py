"""Triton kernels: verification, commit, convolution and sampling on a GPU, and the choice between them."""
