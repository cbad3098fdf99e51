"""The tier that holds the data: a client trains and evaluates the model that its station sends."""

import hfedatm  # noqa: F401 (finds modules by the names they had)
