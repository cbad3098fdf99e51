"""Transport plans: marginals, and the algebra on which keeping the function rests."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfedatm_core.resizing.plans import Plan, even_plan, transport_plan

sizes = st.integers(1, 12)


def check_marginals(plan, target, station):
    """Every row of A and every column of B sums to 1 where it has mass; no small side is lost."""
    assert plan.sizes == (target, station)
    rows, columns = plan.rows.sum(1), plan.columns.sum(1)
    torch.testing.assert_close(rows[~plan.empty], torch.ones(int((~plan.empty).sum())).double())
    assert bool((rows[plan.empty] == 0).all())
    held = plan.mass.sum(0) > 0
    torch.testing.assert_close(columns[held], torch.ones(int(held.sum())).double())
    if target >= station:
        assert bool(held.all())
        torch.testing.assert_close(plan.columns @ plan.rows, torch.eye(station).double())
    if target <= station:
        assert not bool(plan.empty.any())
        torch.testing.assert_close(plan.rows @ plan.columns, torch.eye(target).double())


@given(sizes, sizes, st.booleans())
def test_even_plans_split_and_join_neighbours(target, station, uneven):
    plan = even_plan(target, station, uneven)
    check_marginals(plan, target, station)
    copies = (plan.mass > 0).sum(0 if target >= station else 1)
    assert int(copies.max() - copies.min()) <= 1
    assert plan.is_identity == (target == station)


@given(sizes, sizes, st.integers(0, 2**31), st.sampled_from([float("inf"), 0.5, 0.1]))
def test_transport_gives_every_channel_of_the_smaller_side_a_place(target, station, seed, leave):
    cost = torch.rand(target, station, generator=torch.Generator().manual_seed(seed))
    plan = transport_plan(cost, leave)
    check_marginals(plan, target, station)
    assert bool(((plan.mass == 0) | (plan.mass == 1)).all())
    if leave == float("inf"):
        assert not bool(plan.empty.any())


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**31), st.sampled_from([9.0, 0.4]))
def test_transport_is_the_cheapest_of_all_plans(small, more, seed, leave):
    large = small + more - 1
    cost = torch.rand(large, small, generator=torch.Generator().manual_seed(seed)).double()

    def price(choice):
        return sum(leave if c == small else float(cost[i, c]) for i, c in enumerate(choice))

    choices = itertools.product(range(small + 1), repeat=large)
    best = min(price(c) for c in choices if set(range(small)) <= set(c))
    plan = transport_plan(cost, leave)
    found = float((plan.mass * cost).sum()) + leave * int(plan.empty.sum())
    assert found == pytest.approx(best, abs=1e-12)
    turned = transport_plan(cost.T.contiguous(), leave)
    paid = float((turned.mass * cost.T).sum()) + leave * int((turned.mass.sum(0) == 0).sum())
    assert paid == pytest.approx(best, abs=1e-12)


def test_a_plan_that_loses_a_channel_is_refused():
    with pytest.raises(ValueError, match="every channel of the smaller side"):
        Plan(torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]).double())
    with pytest.raises(ValueError, match="not negative"):
        Plan(torch.tensor([[1.0, -1.0]]).double())
