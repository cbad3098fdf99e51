"""The tier in the middle: a server to its clients, a client to the server."""
