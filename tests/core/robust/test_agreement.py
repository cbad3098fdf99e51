"""Agreement: who points elsewhere than the others is left out, and nobody else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfedatm_core import Update
from hfedatm_core.robust import agreement
from hfedatm_core.robust.bounding import Bounds
from hfedatm_core.robust.updates import BoundedUpdates

START = {
    "a": torch.randn(60, 40, generator=torch.Generator().manual_seed(0)),
    "b": torch.zeros(2000),
}
DIRECTION = {
    n: torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) for n, v in START.items()
}


def honest(seed: int, noise: float = 1.0) -> Update:
    """Half of the way is common, the other half its own: cosines of about one half."""
    generator = torch.Generator().manual_seed(100 + seed)
    state = {
        name: start + DIRECTION[name] + noise * torch.randn(start.shape, generator=generator)
        for name, start in START.items()
    }
    return Update(state, num_examples=10, name=f"node {seed}")


def hostile(how: str) -> Update:
    generator = torch.Generator().manual_seed(7)
    own = honest(99).state
    change = {
        "flip": lambda n: START[n] - (own[n] - START[n]),
        "noise": lambda n: START[n] + 1.4 * torch.randn(own[n].shape, generator=generator),
        "rider": lambda n: START[n].clone(),
        "shift": lambda n: START[n] + 1.4,
        "far": lambda n: START[n] + 1e6 * (own[n] - START[n]),
    }[how]
    return Update({name: change(name) for name in START}, num_examples=10, name="liar")


def held(updates, earlier=None, least=0.25) -> BoundedUpdates:
    found = BoundedUpdates(START, Bounds(2.0, 3.0, least), earlier=earlier)
    for update in updates:
        found.add(update)
    return found


def names(updates) -> list[str]:
    return [update.name for update in updates]


@pytest.mark.parametrize(
    "how, count",
    [
        *((how, n) for how in ("flip", "noise", "rider", "shift", "far") for n in (5, 10)),
        *((how, n) for how in ("flip", "far") for n in (3, 4)),
    ],
)
def test_a_liar_is_left_out_and_nobody_else(how, count):
    others = [honest(seed) for seed in range(count - 1)]
    for place in (0, 1, count - 1):
        found = held([*others[:place], hostile(how), *others[place:]])
        assert names(found) == names(others)
        assert len(found) == count - 1
        (cut,) = found.cuts()
        assert (cut.name, cut.factor) == ("liar", 0.0)


@pytest.mark.parametrize("count", [3, 4])
def test_of_a_few_one_that_is_merely_different_stays(count):
    """Two stations whose domains are alike make an honest third one look odd."""
    others = [honest(seed) for seed in range(count - 1)]
    found = held([*others, hostile("rider")])
    assert names(found) == [*names(others), "liar"]


@given(st.integers(1, 12), st.integers(0, 100))
def test_honest_updates_all_enter(count, seed):
    updates = [honest(seed + k) for k in range(count)]
    found = held(updates)
    assert names(found) == names(updates) and found.cuts() == []


@given(st.integers(3, 9), st.integers(0, 100))
def test_where_nobody_agrees_nobody_is_left_out(count, seed):
    updates = [
        Update(
            {
                n: s
                + torch.randn(s.shape, generator=torch.Generator().manual_seed(1000 * seed + k))
                for n, s in START.items()
            },
            name=f"node {k}",
        )
        for k in range(count)
    ]
    assert names(held(updates)) == names(updates)


def test_two_are_not_compared():
    updates = [honest(0), hostile("flip")]
    assert names(held(updates)) == ["node 0", "liar"]


def test_a_majority_always_enters():
    updates = [honest(0), honest(1), *(hostile("far") for _ in range(3))]
    assert len(held(updates)) >= 3


def test_who_was_out_of_line_before_needs_more_than_one_quiet_step():
    quiet = [
        Update(
            {
                n: s + 1e-3 * torch.randn(s.shape, generator=torch.Generator().manual_seed(k))
                for n, s in START.items()
            },
            name=f"node {k}",
        )
        for k in range(5)
    ]
    assert len(held(quiet)) == 5
    before = {"node 0": -0.4} | {f"node {k}": 0.5 for k in range(1, 5)}
    found = held(quiet, earlier=before)
    assert names(found) == [f"node {k}" for k in range(1, 5)]
    assert found.standing["node 0"] == pytest.approx(-0.2, abs=0.05)
    assert held(quiet, earlier={"somebody else": 1.0}).standing["somebody else"] == 1.0


def test_it_can_be_switched_off():
    assert len(held([*(honest(k) for k in range(4)), hostile("flip")], least=0.0)) == 5


def test_agreements_are_those_of_numpy_over_the_matrices():
    updates = [*(honest(k) for k in range(4)), hostile("noise")]
    moves = [(u.state["a"] - START["a"]).double().numpy().ravel() for u in updates]
    norms = [np.linalg.norm(move) for move in moves]
    cosine = np.array(
        [
            [a @ b / x / y for b, y in zip(moves, norms, strict=True)]
            for a, x in zip(moves, norms, strict=True)
        ]
    )
    wanted = [sorted(np.delete(row, k), reverse=True)[1] for k, row in enumerate(cosine)]
    found = held(updates).standing
    np.testing.assert_allclose([found[u.name] for u in updates], wanted, rtol=1e-4)


@given(st.permutations(range(6)))
def test_the_order_of_arrival_changes_nothing(order):
    updates = [*(honest(k) for k in range(5)), hostile("shift")]
    found = held([updates[k] for k in order])
    assert sorted(names(found)) == sorted(names(updates[:5]))
    assert found.standing == pytest.approx(held(updates).standing)


def test_biases_and_counters_tell_nothing_where_there_are_matrices():
    state = {"w": torch.ones(2, 2), "b": torch.ones(2), "n": torch.tensor(1)}
    assert agreement.telling(state) == ["w"]
    assert agreement.telling({"b": torch.ones(2), "n": torch.tensor(1)}) == ["b"]


@given(st.integers(1, 500))
def test_peers_are_few_distinct_and_there(count):
    found = agreement.peers(count)
    assert len(found) == len(set(found)) == min(count, agreement.PEERS)
    assert all(0 <= place < count for place in found)
