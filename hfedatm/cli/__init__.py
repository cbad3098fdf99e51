"""The ``hfedatm`` command."""
