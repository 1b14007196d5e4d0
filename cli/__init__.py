"""Shared parts of all command lines: exit status, files, devices, prompts, pictures. Begin with
``command_line``.
"""
