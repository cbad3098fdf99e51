"""Counts of an evaluation: bounded like claims, whole, and adding up."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfedatm_core.robust.counting import bounded_counts, score, with_domains

parts = st.dictionaries(st.sampled_from("abc"), st.integers(0, 10**6), min_size=1)


@st.composite
def nodes(draw) -> dict[str, float]:
    sizes = draw(parts)
    right = {name: draw(st.integers(0, size)) for name, size in sizes.items()}
    counts = {"num-examples": sum(sizes.values()), "correct": sum(right.values())}
    counts |= {f"num-examples/{name}": size for name, size in sizes.items()}
    counts |= {f"correct/{name}": count for name, count in right.items()}
    return {**counts, "loss-sum": 2.0 * counts["num-examples"]}


@given(st.lists(nodes(), max_size=6))
def test_nobody_has_more_than_three_times_the_median_and_counts_still_add_up(counts):
    found = bounded_counts(counts, 3.0)
    sizes = [one["num-examples"] for one in counts if one["num-examples"]]
    for before, after in zip(counts, found, strict=True):
        if len(sizes) > 1:
            most = 3 * (min(sizes) if len(sizes) == 2 else statistics.median(sizes))
            assert after["num-examples"] <= most
            if before["num-examples"] <= most:
                assert after == before
        for kind in ("num-examples", "correct"):
            assert after[kind] == int(after[kind])
            assert after[kind] == sum(v for n, v in after.items() if n.startswith(kind + "/"))
        assert 0 <= after["correct"] <= after["num-examples"]


def test_without_a_factor_counts_are_what_they_are():
    counts = [{"num-examples": n, "correct": 1.0} for n in (1, 10, 10**9)]
    assert bounded_counts(counts, 0.0) == counts


@given(st.lists(st.integers(0, 20), min_size=3, max_size=9), st.integers(0, 20))
def test_one_node_moves_the_score_by_no_more_than_its_part_of_what_the_others_differ(rates, lie):
    def scored(last):
        return score([{"num-examples": 20.0, "correct": float(r)} for r in [*rates, last]])

    spread = (max(rates) - min(rates)) / 20
    moved = abs(scored(lie) - scored(rates[0]))
    assert moved <= 2 * spread / (len(rates) + 1) + 1e-12


def test_of_two_nodes_all_examples_count_alike():
    counts = [{"num-examples": 10.0, "correct": 10.0}, {"num-examples": 30.0, "correct": 0.0}]
    assert score(counts) == pytest.approx(0.25)


def test_a_node_that_names_no_domain_has_one():
    named = {"num-examples": 2.0, "correct": 1.0, "num-examples/a": 2.0, "correct/a": 1.0}
    bare = {"num-examples": 5.0, "correct": 5.0}
    assert with_domains([bare, bare]) == [bare, bare]
    _, found = with_domains([named, bare])
    assert found == {**bare, "num-examples/unknown": 5.0, "correct/unknown": 5.0}
