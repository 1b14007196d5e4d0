"""Parts around the loop that serve a request: choice of a draft, writing, comparing.

A run in one paragraph. ``options`` has the table of all options, and its ``Request`` checks those
of a command line, with the prompt, the device and the memory, before any weight is read. A
``session.Session`` loads the model. Its ``chooser.Setting`` makes a ``Drafting`` of the options of
drafting: a drafter with its policy. A ``writer.Writer`` has one KV cache: it reads a prompt
(``begin``) and writes texts after it (``rounds``). There a ``Text`` grows by the loop's rounds, and
a ``Sample`` records them, with the seconds they took; readers of the rounds show the text. A
``together.Scheduler`` runs several writers side by side, whose texts share the model's steps, and
``ranks`` runs all of this on each of several processes.
"""
