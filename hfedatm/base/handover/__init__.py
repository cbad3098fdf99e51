"""Hand work from a process that Flower starts for one message to a long-lived process.

The short-lived process puts a job into a *spool*, a directory, and waits; the long-lived process
does the jobs in it. A station uses this to hand the server's messages to its run on its own
SuperLink. Messages between tiers and jobs in a spool have the same form (`recordfile`, `parcel`).
"""
