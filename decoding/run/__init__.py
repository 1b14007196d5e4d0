"""The run of a request: the choice of a draft, its costs and plan files, writing, comparing. Begin with ``chooser``."""
