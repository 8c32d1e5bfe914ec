"""The target's passes on a GPU: weights, states, buffers of a bucket, and the launches of one pass."""
