"""What every folder may use: files, command lines and their parsers, devices, tables, pictures.

Runs no model and tokenizes nothing, and imports no more of this project than ``model.errors``.
Defaults that several commands share are here too.
"""
