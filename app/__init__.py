"""Shared parts of all command lines: start, exit status, options, files, devices, tables, pictures.
Begin with ``command_line``.
"""
