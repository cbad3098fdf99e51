"""Metrics of an evaluation, as sums that can be added over examples, clients and stations."""

from hfedatm_core.metrics.base import Metric

__all__ = ["Metric"]
