"""The one error of secure aggregation."""


class SecureAggregationError(RuntimeError):
    """A message or a stage of secure aggregation is refused; the text names client and reason."""
