"""The verifier: it owns weights, session states, sampling and acceptance."""
