"""Tables of results: which runs make a table, running them, and setting them in type."""
