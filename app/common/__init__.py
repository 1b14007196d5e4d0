"""What every folder may use: files, command lines and their parsers, devices, tables, pictures.

Knows nothing of models and texts, and imports no more of this project than ``model.errors``.
"""
