"""The cost model: bytes are exact, and what is fitted is found again."""

import sys
from pathlib import Path

import pytest
from helpers import run_small

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from helpers import lines_of  # noqa: E402
from scaling_model import TREES, Link, Network, bytes_up, fit, round_cost  # noqa: E402

LINK = Link(message_seconds=0.05, mb_seconds=0.02, idle_mb=160, node_mb=0.5, held_share=2.0)


def test_bytes_of_a_run_that_the_constants_have_not_seen(tmp_path):
    """Two sizes of a run give model and Grams; a third run has the bytes that follow from them."""

    def sent(stations, clients, rounds):
        folder = run_small(
            tmp_path / f"{stations}-{clients}-{rounds}",
            rounds=1,
            **{
                "gram-min-rows": 1,
                "stations": stations,
                "clients-per-station": clients,
                "station-rounds": rounds,
            },
        )
        [line] = lines_of(folder)
        return [line["bytes_up"]["stations"], line["bytes_up"]["clients"]]

    once, twice = sent(2, 2, 1)[1], sent(2, 2, 2)[1]
    model = (twice - once) / 4
    network = Network("tiny", model, once / 4 - model)
    assert bytes_up((3, 3), network, station_rounds=3) == pytest.approx(sent(3, 3, 3))


def test_bytes_of_a_deeper_tree(tmp_path):
    """A small tree gives the bytes of products; a wider one has the bytes that follow from them."""

    def sent(tiers):
        first, second, last = map(int, tiers.split("x"))
        small = {"gram-min-rows": 1, "tiers": tiers, "station-rounds": "1x1"}
        small |= {"stations": first * second, "clients-per-station": last}
        [line] = lines_of(run_small(tmp_path / tiers, rounds=1, **small))
        return line["bytes_up"]["stations"], line["bytes_up"]["clients"]

    stations, clients = sent("1x2x2")
    whole = clients / 4
    products = stations - 3 * whole
    assert products > 0
    network = Network("tiny", whole, 0.0, products)
    outer, inner, below = bytes_up((2, 3, 2), network)
    assert (outer + inner, below) == pytest.approx(sent("2x3x2"))


def loads(link):
    """Return what a link of these constants would measure."""
    return [
        {
            "nodes": nodes,
            "kilobytes": kilobytes,
            "link CPU seconds per message": link.seconds(1, kilobytes / 1000),
            "link memory MB": {"most": link.memory(nodes, kilobytes / 1000)},
        }
        for nodes, kilobytes in ((50, 240), (200, 240), (50, 2400))
    ]


def test_constants_are_found_again():
    found = fit(loads(LINK))
    for name, value in vars(LINK).items():
        assert getattr(found, name) == pytest.approx(value), name


def test_deeper_trees_make_every_link_lighter():
    network = Network("n", 250_000, 180_000)
    flat, deep = (round_cost(sizes, network, LINK) for sizes in ((1000,), (10, 10, 10)))
    assert flat["clients"] == deep["clients"] == 1000
    assert max(deep["MB of a link"]) < max(flat["MB of a link"])
    assert deep["seconds"] < flat["seconds"]
    assert {round_cost(sizes, network, LINK)["clients"] for sizes in TREES} >= {10**3, 10**5, 10**7}
