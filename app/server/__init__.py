"""Server: OpenAI's endpoints for texts and chats, and a live page, over one session.

``requests`` has what clients ask for and ``answers`` what they are told. ``worker`` writes the
texts. ``network`` is the server, and ``live.html`` its page.
"""
