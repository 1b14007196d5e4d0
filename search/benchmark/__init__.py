"""What ``benchmark.py`` measures, and how it is shown."""
