"""The speculative loop and everything it is made of."""
