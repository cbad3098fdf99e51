"""Tables of results: define the runs of a table, run them, and typeset the table."""
