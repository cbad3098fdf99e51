"""Merged statistics of BatchNorm are those of all data together."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hfedatm_core import Update, merge


def fitted(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a BatchNorm whose statistics are exactly those of the rows."""
    norm = nn.BatchNorm1d(rows.shape[1])
    norm.running_mean = rows.mean(0)
    norm.running_var = rows.var(0, correction=0)
    return norm.state_dict()


@given(st.lists(st.integers(2, 40), min_size=1, max_size=5), st.floats(0, 50), st.integers(0, 99))
def test_pooled_statistics_are_those_of_all_rows(sizes, apart, seed):
    torch.manual_seed(seed)
    parts = [torch.randn(size, 3) + apart * torch.randn(3) for size in sizes]
    updates = [Update(fitted(rows), num_examples=len(rows)) for rows in parts]
    merged = merge(updates, fot=False, regmean=False, pool_variances=True).state
    whole = fitted(torch.cat(parts))
    torch.testing.assert_close(merged["running_mean"], whole["running_mean"], rtol=1e-4, atol=1e-4)
    # A float32 mean of m knows its square to about m² 2⁻²³.
    slack = 1e-4 + 1e-6 * float(whole["running_mean"].abs().max()) ** 2
    torch.testing.assert_close(merged["running_var"], whole["running_var"], rtol=1e-4, atol=slack)
    assert merged["running_var"].dtype == torch.float32


def test_without_pooling_the_distance_of_the_means_is_lost():
    left, right = torch.randn(500, 3) - 10, torch.randn(500, 3) + 10
    updates = [Update(fitted(rows)) for rows in (left, right)]
    mean = merge(updates, fot=False, regmean=False).state
    pooled = merge(updates, fot=False, regmean=False, pool_variances=True).state
    assert mean["running_var"].max() < 2
    assert pooled["running_var"].min() > 90


def test_everything_else_is_merged_as_before():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(3)]
    updates = [Update(net.state_dict()) for net in nets]
    mean = merge(updates, fot=False, regmean=False).state
    pooled = merge(updates, fot=False, regmean=False, pool_variances=True).state
    assert mean.keys() == pooled.keys()
    for key, value in mean.items():
        torch.testing.assert_close(pooled[key], value)  # the means are all zero here
