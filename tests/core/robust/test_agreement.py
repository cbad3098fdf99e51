"""Agreement: who points elsewhere than the others is left out, and nobody else."""

import itertools

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


@pytest.mark.parametrize("how", ["flip", "noise", "far"])
def test_who_is_left_out_does_not_change_what_is_usual_for_the_others(how):
    """Some are cut back, because honest lengths differ: by the same with and without the liar."""
    others = [honest(seed) for seed in range(5)]
    for name, start in START.items():
        others[4].state[name] = start + 3 * (others[4].state[name] - start)
    without, found = held(others), held([hostile(how), *others])
    assert any(cut.factor < 1 for cut in without.cuts())
    assert found.cuts()[1:] == without.cuts() and found.cuts()[0].name == "liar"
    for one, wanted in zip(found, without, strict=True):
        assert all(torch.equal(one.state[name], wanted.state[name]) for name in START)
        assert one.reach.limits == wanted.reach.limits


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


def quiet(count: int = 5) -> list[Update]:
    """Updates as at the end of training: nobody agrees with anybody."""
    return [
        Update(
            {
                n: s + 1e-3 * torch.randn(s.shape, generator=torch.Generator().manual_seed(k))
                for n, s in START.items()
            },
            name=f"node {k}",
        )
        for k in range(count)
    ]


def test_where_nobody_agrees_the_record_of_earlier_steps_decides():
    before = {"node 0": -0.3} | {f"node {k}": 0.5 for k in range(1, 5)}
    found = held(quiet(), earlier=before)
    assert names(found) == [f"node {k}" for k in range(1, 5)]
    assert found.standing == before  # and the step itself adds nothing
    assert held(quiet(), earlier={"somebody else": 1.0}).standing["somebody else"] == 1.0


def test_who_was_honest_while_it_could_be_seen_is_not_left_out_when_it_looks_odd():
    """The only one of its domain: in line early, without a direction in common later."""
    odd = hostile("noise")
    others = [honest(k) for k in range(4)]
    assert names(held([*others, odd])) == names(others)  # nothing is known of it
    assert names(held([*others, odd], earlier={"liar": 0.3})) == [*names(others), "liar"]


@pytest.mark.parametrize("count", [5, 10])
def test_who_opposes_the_others_in_a_clear_step_is_left_out_whatever_its_record(count):
    others = [honest(seed) for seed in range(count - 1)]
    found = held([*others, hostile("flip")], earlier={"liar": 100.0})
    assert names(found) == names(others)


@pytest.mark.parametrize("count", [3, 4])
def test_of_three_or_four_a_node_that_opposes_the_others_is_judged_by_its_record(count):
    """Two stations of similar domains make an honest third one look like a flipped one."""
    others = [honest(seed) for seed in range(count - 1)]
    updates = [*others, hostile("flip")]
    assert names(held(updates)) == names(others)
    assert names(held(updates, earlier={"liar": 2.8})) == [*names(others), "liar"]


@pytest.mark.parametrize("how", ["flip", "noise", "rider"])
def test_a_record_falls_with_every_step_that_speaks_against_the_node(how):
    records, updates = [{}], [*(honest(k) for k in range(4)), hostile(how)]
    for _ in range(3):
        records.append(held(updates, earlier=records[-1]).standing)
    of_liar = [record.get("liar", 0.0) for record in records]
    assert all(later < earlier for earlier, later in itertools.pairwise(of_liar))
    assert all(records[-1][update.name] > records[-2][update.name] > 0 for update in updates[:4])


def test_two_camps_without_a_common_direction_are_both_let_in():
    """Late in training domains pull apart; a flipped update is then in line with half of them."""

    def camp(sign: float, seed: int) -> Update:
        generator = torch.Generator().manual_seed(seed)
        state = {
            n: s + sign * DIRECTION[n] + torch.randn(s.shape, generator=generator)
            for n, s in START.items()
        }
        return Update(state, name=f"node {seed}")

    updates = [camp(1, 0), camp(1, 1), camp(-1, 2), camp(-1, 3), camp(-1, 4)]
    assert names(held(updates)) == names(updates)
    found = held(updates, earlier={"node 2": -0.1})
    assert names(found) == ["node 0", "node 1", "node 3", "node 4"]


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
    found = held(updates)._agreements
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4)
    pairs = sorted(cosine[np.triu_indices(5, 1)], reverse=True)
    assert found[1] == pytest.approx(pairs[4], rel=1e-4)
    added = [pairs[4] * (a - 0.25 * pairs[4]) for a in wanted]
    records = held(updates, earlier={"node 1": 2.0}).standing
    assert records["node 0"] == pytest.approx(added[0], rel=1e-3)
    assert records["node 1"] == pytest.approx(2.0 + added[1], rel=1e-3)


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
