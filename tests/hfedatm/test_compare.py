"""`hfedatm compare`: what differs, who wins, and how sure one can be."""

import json
import statistics

import pytest
from helpers import a_record
from scipy import stats

from hfedatm.comparison import Estimate, differing, group, p_value, scores
from hfedatm.runs import Run, read_run


def make(name: str, accuracy: float, **settings) -> Run:
    """Return a run that only exists in memory, with one round."""
    record = a_record(
        source={"accuracy": 0.5, "loss": 1.0}, unseen={"domain": "c", "accuracy": accuracy}
    )
    return Run(name, {"settings": {"rounds": 1, "output": name, **settings}}, [record], None)


UNSEEN = "unseen, last round"


def test_interval_is_students():
    values = (0.70, 0.74, 0.81)
    low, high = stats.t.interval(0.95, 2, statistics.fmean(values), stats.sem(values))
    estimate = Estimate(values)
    assert estimate.mean - estimate.half_width == pytest.approx(low)
    assert estimate.mean + estimate.half_width == pytest.approx(high)
    assert Estimate((0.7,)).half_width is None


def test_runs_that_differ_only_in_the_seed_are_one_group():
    runs = [make(f"{lr}-{seed}", 0.5, lr=lr, seed=seed) for lr in (0.1, 0.2) for seed in (0, 1, 2)]
    assert [(g.label, len(g.runs)) for g in group(runs)] == [("lr=0.1", 3), ("lr=0.2", 3)]
    assert set(differing(runs)) == {"lr", "seed"}


def test_a_setting_one_run_does_not_know_differs():
    runs = [make("old", 0.5, seed=0), make("new", 0.5, seed=0, gadget=1)]
    assert differing(runs) == {"gadget": [None, 1]}


def test_a_run_older_than_a_setting_ran_with_its_default():
    runs = [make("old", 0.5), make("new", 0.5, alpha=0.75), make("other", 0.5, alpha=0.5)]
    assert differing(runs[:2]) == {}
    assert differing(runs) == {"alpha": [0.75, 0.75, 0.5]}


def test_same_seeds_are_paired_and_others_are_not():
    first, second = (0.50, 0.60, 0.70), (0.52, 0.63, 0.71)
    score = scores([])[UNSEEN]

    def two(seeds):
        a = [make(f"a{s}", v, lr=1, seed=s) for s, v in enumerate(first)]
        b = [make(f"b{s}", v, lr=2, seed=s) for s, v in zip(seeds, second, strict=True)]
        return group([*a, *b])

    paired = p_value(*two((0, 1, 2)), score)
    assert paired == pytest.approx(stats.ttest_rel(first, second).pvalue)
    unpaired = p_value(*two((5, 6, 7)), score)
    assert unpaired == pytest.approx(stats.ttest_ind(first, second, equal_var=False).pvalue)
    assert paired < unpaired


def test_one_run_each_gives_no_p_value():
    groups = group([make("a", 0.5, lr=1, seed=0), make("b", 0.9, lr=2, seed=0)])
    assert p_value(*groups, scores([])[UNSEEN]) is None


def test_command_on_real_runs(hfedatm, results):
    names = ("avg-0", "avg-1", "hfedatm-0", "hfedatm-1")
    done = hfedatm("compare", *(results / name for name in names), "--json")
    assert done.exit_code == 0, done.output
    table = json.loads(done.stdout)
    assert table["settings"]["differing"]["server-rule"] == ["avg", "avg", "hfedatm", "hfedatm"]
    assert [g["runs"] for g in table["groups"]] == [["avg-0", "avg-1"], ["hfedatm-0", "hfedatm-1"]]
    row = next(row for row in table["scores"] if row["score"] == UNSEEN)
    means = [value["mean"] for value in row["values"]]
    expected = [
        statistics.fmean(
            read_run(results / f"{rule}-{s}").rounds[-1].unseen_accuracy for s in (0, 1)
        )
        for rule in ("avg", "hfedatm")
    ]
    assert means == pytest.approx(expected)
    if row["winner"] is not None:
        assert means[row["winner"]] == max(means)
    assert {row["score"] for row in table["scores"]} >= {
        "source a, last round",
        "source b, last round",
    }


def test_table_shows_intervals(hfedatm, results):
    shown = hfedatm("compare", *(results / f"{r}-{s}" for r in ("avg", "hfedatm") for s in (0, 1)))
    assert "±" in shown.stdout and "p=" in shown.stdout


def test_one_run_cannot_be_compared(hfedatm, results):
    done = hfedatm("compare", results / "avg-0", results / "avg-0")
    assert done.exit_code != 0
    assert "at least two different runs" in str(done.exception)
