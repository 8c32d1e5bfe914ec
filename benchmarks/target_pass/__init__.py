"""`specla bench pass`: whole passes of the 1.47B model on a GPU, against floors and rivals."""
