"""How a process that Flower starts for one message has its work done by one that lives on.

The short-lived side puts a job into a *spool*, a directory, and waits; the long-lived side does
the jobs in it. A station hands the server's messages to its run on its own SuperLink, a client its
training to a process that has imported torch already.
"""
