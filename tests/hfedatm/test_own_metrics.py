"""What users plug in to be measured arrives in every view, averaged as it should be."""

import json
import math
from dataclasses import dataclass

import pytest
import torch
from flwr.app import MetricRecord
from helpers import SMALL, Saboteur, failures_of, last_model, lines_of, log_lines, run_small
from typer.testing import CliRunner

import hfedatm.runtime.local as local
from hfedatm.base.errors import UserError
from hfedatm.base.own_metrics import MOST_OWN, OwnMeans, sendable
from hfedatm.cli.main import typer_app
from hfedatm.contracts import Method, Metric, forward

HERE = "test_own_metrics"


def train(model, batches, received, settings):
    """One step per batch; reports how many examples there were, and a number that is none."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    count = 0
    for inputs, targets in batches:
        loss = torch.nn.functional.cross_entropy(forward(model, inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count += len(targets)
    return {"loss": loss.item(), "seen": count, "broken": math.nan}


@dataclass
class Counting(Method):
    steps = 0

    def correct(self, model):
        self.steps += 1

    def metrics(self):
        return {"steps": float(self.steps)}


class Confident(Metric):
    """Share of examples whose highest probability is above one half."""

    def sums(self, scores, targets):
        sure = scores.softmax(1).amax(1) > 0.5 if len(scores) else torch.zeros(0)
        return torch.stack([sure.sum(), torch.tensor(len(targets))]).double()

    def value(self, sums):
        return float(sums[0] / sums[1])


class Growing(Confident):
    def sums(self, scores, targets):
        return torch.ones(len(targets))


class Surprise(Confident):
    """The perplexity, which is larger than 1 for every example."""

    def sums(self, scores, targets):
        loss = torch.nn.functional.cross_entropy(scores, targets, reduction="none")
        return torch.stack([loss.exp().sum(), torch.tensor(float(len(targets)))])


class NeverEmpty(Confident):
    def sums(self, scores, targets):
        return scores.max().reshape(1)  # an empty batch has no largest score


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HFEDATM_STATE", str(folder / "state"))
        metrics = f"f1, auc, accuracy, {HERE}:Confident"
        shown = "seen, f1, missing"
        for seed in (0, 1):
            with log_lines() as lines:
                run_small(
                    folder,
                    f"own-{seed}",
                    train_fn=f"{HERE}:train",
                    metrics=metrics,
                    show_metrics=shown,
                    seed=seed,
                )
        (folder / "log").write_text("\n".join(lines))
        run_small(folder, "plain")
    return folder


def test_what_a_training_function_returns_is_averaged_by_examples(results):
    for line in lines_of(results / "own-0"):
        stations = line["per_station"]
        examples = sum(s["num-examples"] for s in stations)
        mean = sum(s["seen"] * s["num-examples"] for s in stations) / examples
        assert line["metrics"] == {
            "seen": pytest.approx(mean)
        }  # and what is no number is not there
        assert mean == pytest.approx(90)  # of every client's 100 examples ten are for validation
    assert not failures_of(results / "own-0")


def test_a_methods_numbers_are_averaged_too(tmp_path):
    (line,) = lines_of(run_small(tmp_path, client_method=f"{HERE}:Counting", rounds=1))
    assert line["metrics"] == {"steps": 3.0}  # batches of 32 of 90 examples


def test_metrics_of_source_and_unseen_domain_are_in_the_line(results):
    for line in lines_of(results / "own-0"):
        for where in ("source", "unseen"):
            found = line[where]["metrics"]
            assert found.keys() == {"f1", "auc", "accuracy", "Confident"}
            assert found["accuracy"] == pytest.approx(line[where]["accuracy"])
            assert all(0 <= value <= 1 for value in found.values())


def test_without_them_a_line_is_as_it_was(results):
    for line in lines_of(results / "plain"):
        assert "metrics" not in line
        assert "metrics" not in line["source"] and "metrics" not in line["unseen"]


def test_metrics_change_no_model(results, tmp_path):
    folder = run_small(tmp_path, metrics="f1, auc", seed=0)
    for name, value in last_model(folder).items():
        assert torch.equal(value, last_model(results / "plain")[name])


def test_a_rounds_line_shows_what_was_asked_for(results):
    lines = [line for line in (results / "log").read_text().splitlines() if "round " in line[:6]]
    assert len(lines) == 2
    for line in lines:
        assert "| seen 90 | source f1 0." in line and "| unseen f1 0." in line
        assert "| missing - |" in line and "auc" not in line


def test_a_name_that_no_number_has_is_told_once(results, tmp_path):
    there = "it has: seen, f1, auc, accuracy, Confident."
    told = [line for line in (results / "log").read_text().splitlines() if "show-metrics" in line]
    assert told == [f"  show-metrics: round 1 has no number 'missing'; {there}"]
    with log_lines() as lines:
        run_small(tmp_path, metrics="accuracy", show_metrics="acuracy,accuracy")
    told = [line for line in lines if "show-metrics" in line]
    why = "it has: accuracy. Did you mean 'accuracy'?"
    assert told == [f"  show-metrics: round 1 has no number 'acuracy'; {why}"]


def test_every_view_shows_them(results, monkeypatch):
    monkeypatch.chdir(results)

    def call(*command: str) -> str:
        shown = CliRunner().invoke(typer_app, command, env={"COLUMNS": "200"})
        assert shown.exit_code == 0, shown.output
        return shown.output

    assert "unseen f1" in call("watch", "own-0", "--once")
    assert json.loads(call("watch", "own-0", "--json"))["numbers"]["seen"] == 90
    compared = call("compare", "own-0", "own-1", "plain")
    assert "seen, last round" in compared and "unseen auc, last round" in compared
    call("report", "own-0")
    (page,) = (text for path in results.rglob("*.html") if (text := path.read_text()))
    assert "Other numbers" in page and "source Confident" in page


def test_watch_is_readable_on_a_narrow_terminal_and_shows_what_nobody_asked_for(results):
    shown = (
        CliRunner()
        .invoke(typer_app, ["watch", str(results / "own-0"), "--once"], env={"COLUMNS": "80"})
        .output
    )
    rows = [line.split() for line in shown.splitlines()]
    assert "round loss source unseen moved stations clients up time".split() in rows
    assert ["seen", "90", "90"] in rows  # asked for by show-metrics: before the others
    assert any(row[:2] == ["source", "Confident"] and len(row) == 4 for row in rows)  # not asked
    assert "…" not in shown
    assert " 2 more in rounds.jsonl" in shown  # seen, missing and two of each of four metrics


def test_trackers_get_them(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "server_app.tracking.Trackers._each", lambda self, call: call(_Listener(seen))
    )
    run_small(tmp_path, rounds=1, metrics="f1", client_method=f"{HERE}:Counting")
    assert {"metrics/steps", "source/metrics/f1", "unseen/metrics/f1"} <= seen[0].keys()


class _Listener:
    def __init__(self, seen):
        self._seen = seen

    def log(self, step, values):
        self._seen.append(values)

    def finish(self, values):
        pass


# --- what nobody may do with them


def spoilt(monkeypatch, message_type, change, clients):
    def spoil(message, reply):
        change(reply.content)
        return reply

    monkeypatch.setattr(local, "client_app", Saboteur(spoil, set(clients), message_type))


def test_one_liars_numbers_leave_the_model_alone(results, tmp_path, monkeypatch):
    def lie(content):
        metrics = {**content["metrics"], "seen": 1e15}
        content["metrics"] = MetricRecord(metrics)

    spoilt(monkeypatch, "train", lie, [0])
    given = {"train_fn": f"{HERE}:train", "metrics": "f1"}
    folder = run_small(tmp_path, **given)
    for line in lines_of(folder):
        assert math.isfinite(line["metrics"]["seen"]) and line["clients"]["answered"] == 4
    for name, value in last_model(folder).items():
        assert torch.equal(value, last_model(results / "own-0")[name])


def test_sums_of_more_than_the_examples_are_refused(tmp_path, monkeypatch):
    from hfedatm.base.records import record_to_state, state_to_record

    def lie(content):
        sums = record_to_state(content["sums"])
        content["sums"] = state_to_record({"f1": sums["f1"] + 1e6})

    spoilt(monkeypatch, "evaluate", lie, [0])
    folder = run_small(tmp_path, metrics="f1", rounds=1)
    (failure,) = failures_of(folder)
    assert "client 0" in failure["node"] and "f1 cannot come from" in failure["reason"]
    (line,) = lines_of(folder)
    assert 0 <= line["source"]["metrics"]["f1"] <= 1


def test_a_flood_of_names_does_not_push_out_those_of_the_others():
    means = OwnMeans()
    means.add({f"a{n}": 1.0 for n in range(60)}, 10)
    for _ in range(2):
        means.add({"zeal": 4.0}, 5)
    found = means.result()
    assert len(found) == MOST_OWN and found["zeal"] == 4.0


@pytest.mark.parametrize("name", ["num-examples", "seconds", "\x1b[2J", ""])
def test_a_name_that_cannot_travel_is_refused_where_it_is_made(name):
    with pytest.raises(UserError, match="choose another name"):
        sendable({"loss": 1.0, name: 2.0})


def test_too_many_numbers_are_refused_where_they_are_made():
    with pytest.raises(UserError, match=f"{MOST_OWN} at most"):
        sendable({"loss": 1.0} | {f"n{n}": 1.0 for n in range(MOST_OWN + 1)})


# --- privacy


SECURE = {"secure_aggregation": True, "clients_per_station": 3, "gram_min_rows": 8, "rounds": 1}


def test_a_secure_sum_has_the_numbers_that_were_asked_for_and_no_others(tmp_path):
    given = {**SECURE, "train_fn": f"{HERE}:train", "metrics": "f1"}
    silent = lines_of(run_small(tmp_path, "silent", **given))[0]
    assert "metrics" not in silent and "seen" not in silent["per_station"][0]
    assert "metrics" not in silent["source"] and "f1" in silent["unseen"]["metrics"]
    asked = lines_of(run_small(tmp_path, "asked", show_metrics="seen", **given))[0]
    in_the_clear = {**given, "secure_aggregation": False}
    (plain,) = lines_of(run_small(tmp_path, "plain", **in_the_clear))
    assert asked["metrics"] == {"seen": pytest.approx(plain["metrics"]["seen"], rel=1e-6)}


def test_dp_sgd_sends_no_number_that_it_does_not_cover(tmp_path, monkeypatch):
    monkeypatch.setattr(Counting, "per_example_loss", True)
    sent = []

    def listen(content):
        sent.append(dict(content["metrics"]))

    spoilt(monkeypatch, "train", listen, range(4))
    folder = run_small(
        tmp_path,
        rounds=1,
        client_method=f"{HERE}:Counting",
        metrics="f1",
        **{"dp-sgd": True, "privacy.epsilon": 50.0},
    )
    assert sent and all("steps" not in metrics and "loss" in metrics for metrics in sent)
    (line,) = lines_of(folder)
    assert "metrics" not in line and "metrics" not in line["source"]


# --- mistakes


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("f2", "metrics: .*f2.*accuracy, auc, f1"),
        ("f1, f1", "metrics: two of them are called 'f1'"),
        (f"{HERE}:train", "metrics: .*must be a subclass"),
        (f"{HERE}:Growing", "metrics: .*must not depend on them"),
        (f"{HERE}:Surprise", "metrics: .*a number between 0 and 1: scale what is larger"),
        (f"{HERE}:NeverEmpty", r"^metrics: .*\(sums, test_own_metrics.py:\d+\)"),
    ],
)
def test_a_metric_that_cannot_work_is_refused_before_round_1(tmp_path, metrics, message):
    with pytest.raises(UserError, match=message):
        run_small(tmp_path, metrics=metrics)
    assert not (tmp_path / "run").exists()


def test_a_node_imports_no_metric_that_its_owner_does_not_allow(policy):
    from helpers import SPEC, ask_client, small_settings, tiny_net

    policy(code={"allowed": [SMALL["dataset"], SMALL["model"]]})
    settings = small_settings(metrics=f"{HERE}:Confident")
    reply = ask_client(settings, 0, tiny_net(SPEC).state_dict(), "evaluate")
    assert "code.allowed" in str(reply["failure"]["reason"])
