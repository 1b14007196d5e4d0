"""Finds the layer plan that drafts fastest, on texts the model writes itself; also the benchmarks' prompts."""

import model  # noqa: F401 - first of all: it says how torch's threads wait
