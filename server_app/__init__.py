"""The top tier: merges the stations' models and evaluates on the unseen domain."""

import hfedatm  # noqa: F401 (finds modules by the names they had)
