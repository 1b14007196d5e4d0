"""Server: OpenAI's endpoints for texts and chats, and a live page, over one session.

``requests`` has what may be asked for and ``answers`` what is told, ``worker`` writes the texts,
``network`` is the server.
"""
