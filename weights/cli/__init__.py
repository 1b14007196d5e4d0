"""Base of every command line: exit status, files, devices, prompts, pictures. Begin with ``command_line``."""
