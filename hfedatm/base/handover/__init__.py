"""How a process that Flower starts for one message has its work done by one that lives on.

The short-lived side puts a job into a *spool*, a directory, and waits; the long-lived side does
the jobs in it. So a station hands the server's messages to its run on its own SuperLink. What
travels between tiers, and lies in a spool, is written in one form (`recordfile`, `parcel`).
"""
