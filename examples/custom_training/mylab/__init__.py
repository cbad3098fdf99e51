"""Everything a laboratory brings of its own."""
