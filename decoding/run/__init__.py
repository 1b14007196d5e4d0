"""Everything around the loop that serves a request: choice of a draft, plan files, writing,
comparing.

Begin with ``chooser``, then ``writer``; ``together`` writes many texts at once, ``ranks`` on
several processes.
"""
