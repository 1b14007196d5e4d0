"""The built-in prompts: what benchmarks measure with."""
