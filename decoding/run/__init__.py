"""Parts around the loop that serve a request: choice of a draft, writing, comparing.

The way of a text from the command line to the loop. Each value is made of the one above it:

    value        made by               holds
    Namespace    options.make_parser   options as given; ``merge_options`` puts those of a call of
                                       Python, or of a request to the server, in their place
    Request      request.Request       the model's folder, prompt and memory, checked before any
                                       weight is read
    Session      session.Session       the loaded model, and all that its texts share
    TextOptions  Session.asked         the options of one text in their types, files read; its
                                       ``DraftOptions`` are a part of them
    Drafting     Setting.drafting      how the text is drafted: a drafter, made once for all texts
                                       (``made_for``), under a policy of its own (``policy_for``)
    Task         Session.task          the text after its prompt, its drafting, its readers
    Round ...    Writer.rounds         the loop itself, ``speculate``, on a KV cache that has read
                                       the prompt (``Writer.begin``)

A ``together.Scheduler`` runs several writers side by side, whose texts share the model's steps; it
keeps the state of each text in an ``Entry``. With ``ranks``, all of this runs on each of several
processes.
"""
