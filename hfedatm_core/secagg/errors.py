"""The one error of secure aggregation."""


class SecureAggregationError(RuntimeError):
    """A message or a stage of secure aggregation is not acceptable; the text says whose and why."""
