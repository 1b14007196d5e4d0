"""The base of every command line: errors and exit status, files, devices, prompts, pictures. Begin with ``command_line``."""
