"""Shared parts of all command lines: exit status, options, files, devices, tables, pictures. Begin
with ``command_line``.
"""
