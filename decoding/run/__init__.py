"""Parts around the loop that serve a request: choice of a draft, writing, comparing.

The way of a request, from the command line to the loop:

    options.OPTIONS   the table of all options; argparse makes a Namespace of a command line,
                      merge_options of the arguments of a call or the fields of a request
    options.Request   a command line, checked before any weight is read: model, prompt, memory
    TextOptions       the options of one text in their types; files are read, no Namespace goes on
    session.Session   the loaded model, which makes a task of each text
    chooser.Setting   makes the task's Drafting, a drafter with its policy
    writer.Task       a text after its prompt, its drafting, its readers; its Sample is the result
    writer.Writer     one KV cache: it reads a prompt (begin) and writes tasks by the loop (rounds)

A ``together.Scheduler`` runs several writers side by side, whose texts share the model's steps.
With ``ranks``, all of this runs on each of several processes.
"""
