"""Target models the verifier can run."""
