"""Finds the layer plan that drafts fastest, on texts the model writes itself; also the benchmarks' prompts."""
