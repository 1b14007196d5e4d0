"""The speculative loop and everything it is made of."""

import model  # noqa: F401 - first of all: it says how torch's threads wait
