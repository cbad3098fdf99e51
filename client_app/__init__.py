"""The tier that holds the data: trains and evaluates what its station sends."""

import hfedatm  # noqa: F401 (finds modules by the names they had)
