"""Stations with even classes: in a run, in a drawing, and suggested for nodes with own data."""

import json

import pytest
import torch
from helpers import SMALL, lines_of, run_small, small_settings, tiny_data

from client_app.data import class_counts, client_data, shares_of
from hfedatm.base.errors import UserError
from hfedatm_core.data import DomainData


def uneven(data_dir: str | None = None) -> DomainData:
    """Return tiny data without class 0 in domain a, and without class 1 in domain b."""
    data = tiny_data()
    kept = {
        name: data.domains[name].subset((data.domains[name].targets != left).nonzero().flatten())
        for name, left in (("a", 0), ("b", 1), ("c", 9))
    }
    return DomainData(data.spec, kept)


UNEVEN = {**SMALL, "dataset": "test_assign:uneven"}


def lacking(data_dir: str | None = None, classes: str = "2121") -> DomainData:
    """Return four domains that each lack one of these classes, and one to test on."""
    data = tiny_data()
    whole = data.domains["a"]
    kept = {
        name: whole.subset((whole.targets != left).nonzero().flatten())
        for name, left in zip("abcde", (*map(int, str(classes)), 9), strict=True)
    }
    return DomainData(data.spec, kept)


@pytest.mark.parametrize(("classes", "other"), [("2121", "mixed"), ("2211", "domain")])
def test_classes_count_and_not_domains(hfedatm, classes, other):
    """In the other order both clients of a station lack one class."""
    given = {**SMALL, "dataset": "test_assign:lacking", "target-domain": "e"}
    worst = {}
    for mode in (other, "eara"):
        place = {**given, "station-assignment": mode, "dataset-params": f"classes={classes}"}
        done = hfedatm("topology", *(f"{k}={v}" for k, v in place.items()), "--json")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)["stations"]
        worst[mode] = max(station["divergence"] for station in found)
    assert worst["eara"] < 0.1 < worst[other]


def test_a_run_gives_every_station_even_classes(hfedatm, tmp_path):
    found = {}
    for mode in ("domain", "eara"):
        given = {**UNEVEN, "station-assignment": mode}
        done = hfedatm("topology", *(f"{k}={v}" for k, v in given.items()), "--json")
        assert done.exit_code == 0, done.output
        found[mode] = [station["divergence"] for station in json.loads(done.stdout)["stations"]]
    assert max(found["eara"]) < 0.1 < min(found["domain"])
    given = {"dataset": "test_assign:uneven", "station_assignment": "eara", "server_rule": "avg"}
    folder = run_small(tmp_path, **given)
    assert not any(line["failures"] for line in lines_of(folder))


def test_every_example_is_still_somewhere_once():
    settings = small_settings(dataset="test_assign:uneven", station_assignment="eara")
    plain = small_settings(dataset="test_assign:uneven")

    def held(chosen):
        return sorted(
            (name, i)
            for s in shares_of(chosen)
            for name, index in s.items()
            for i in index.tolist()
        )

    assert held(settings) == held(plain)


def test_a_task_without_classes_is_refused():
    settings = small_settings(station_assignment="eara", task="regression")
    with pytest.raises(UserError, match="station-assignment=mixed"):
        class_counts(settings, tiny_data(), {"a": torch.arange(5)})


def test_a_node_with_data_of_its_own_is_not_moved(policy, tmp_path):
    policy(data={"folder": str(tmp_path)}, code={"allowed": [SMALL["dataset"], SMALL["model"]]})
    with pytest.raises(UserError, match="hfedatm assign"):
        client_data(small_settings(station_assignment="eara"), 0, {})
    assert len(client_data(small_settings(), 0, {}).train)
    shared = client_data(small_settings(station_assignment="eara"), 0, {"partition-id": 1})
    assert len(shared.train)


@pytest.fixture
def counts(tmp_path):
    path = tmp_path / "counts.csv"
    path.write_text("client,cat,dog\nnorth,9,0\nsouth,0,9\neast,9,0\nwest,0,9\n")
    return path


def test_stations_are_suggested_from_class_counts(hfedatm, counts):
    done = hfedatm("assign", str(counts), "--stations", "2", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["classes"] == ["cat", "dog"]
    assert [one["divergence"] for one in found["stations"]] == pytest.approx([0, 0], abs=1e-12)
    assert sorted(c for one in found["stations"] for c in one["clients"]) == [
        *("east", "north", "south", "west"),
    ]
    shown = hfedatm("assign", str(counts), "--stations", "2", "--capacity", "1,3")
    assert "KL to even classes" in shown.stdout


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("client,cat,dog\nnorth,9\n", (), "needs 2 whole numbers"),
        ("client,cat,dog\nnorth,9,-1\n", (), "needs 2 whole numbers"),
        ("client,cat,dog\nnorth,9,nan\n", (), "needs 2 whole numbers"),
        ("client,cat,dog\nnorth,9,1\nnorth,9,1\n", (), "named twice"),
        ("client,cat\nnorth,9\n", (), "two or more classes"),
        (None, ("--capacity", "1"), "do not fit"),
        (None, ("--capacity", "2,x"), "one number, or 2 with commas"),
    ],
)
def test_mistakes_are_named(hfedatm, counts, text, options, words):
    if text is not None:
        counts.write_text(text)
    done = hfedatm("assign", str(counts), "--stations", "2", *options)
    assert done.exit_code != 0
    assert words in " ".join(f"{done.output} {done.exception}".split())
