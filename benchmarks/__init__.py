"""Benchmarks: identity, speed; every figure in the docs comes from here."""
