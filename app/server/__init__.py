"""Local server of one model: OpenAI's endpoints and a live page.

The path of a request, and the thread of each step:

    network  ``app``       checks the Host and reads the body
    pool     ``requests``  checks its JSON, and encodes the prompt: a ``ParsedRequest``
    network  ``worker``    puts it in the queue, as a ``Job``
    main     ``worker``    submits its texts to the scheduler, between two steps of the others
    main     ``worker``    sends messages about a text: after each round, and at its end
    network  ``app``       responds with the messages, as one JSON value or as a stream of events

The main thread alone uses the model. It shares two queues with the others: the worker's jobs, and
the messages of each job, which it gives to the event loop of the network's thread.
"""
