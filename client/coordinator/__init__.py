"""The coordinator: it turns a Generate request into verifier sessions and attached drafters."""
