"""Runs that learn something else than classes, and runs with augmented batches."""

import json

import pytest
import torch
from helpers import SMALL, small_settings, tiny_data
from torch import nn

from client_app.client import LocalWork
from hfedatm.base.batches import Batches
from hfedatm.base.building import build_method, build_metrics, load_data
from hfedatm.base.errors import UserError
from hfedatm.base.evaluation import evaluate
from hfedatm.base.learning import build_task, find_augmentations
from hfedatm.base.records import BadReply
from hfedatm.base.trust.checking import check, own_code
from hfedatm.base.trust.policy import Policy, PolicyRefusal
from hfedatm.base.wire.numbers import read_counts
from hfedatm.contracts import BadTargets, DataSpec, Domain, DomainData, LearningTask, Metric
from hfedatm.report.page import render
from hfedatm.runs import read_run
from hfedatm.runtime.local import run_locally
from hfedatm_core.robust.counting import bounded_counts

TASKS = {"regression": "numbers", "multi-label": "labels", "test_learning:Pixels": "masks"}


def _data(spec, targets_of):
    tiny = tiny_data()
    domains = {
        name: Domain(name, one.inputs, targets_of(one.inputs, one.targets))
        for name, one in tiny.domains.items()
    }
    return DomainData(spec, domains)


def numbers(data_dir=None):
    """The place of the square, as a number of large size."""
    spec = DataSpec(
        "image", input_shape=(1, 8, 8), outputs=1, target_mean=(1e6,), target_std=(8e5,)
    )
    return _data(spec, lambda _, targets: 1e6 * targets.float().view(-1, 1))


def labels(data_dir=None):
    """Whether the square is at the top, and whether it is not in the middle."""
    return _data(
        DataSpec("image", 2, (1, 8, 8)), lambda _, t: torch.stack([t == 0, t != 1], 1).float()
    )


def masks(data_dir=None):
    """Which pixels are bright."""
    return _data(DataSpec("image", 2, (1, 8, 8)), lambda inputs, _: (inputs[:, 0] > 0.5).long())


class Pixels(LearningTask):
    """A class for each pixel."""

    measure = "pixel accuracy"

    @property
    def output_shape(self):
        return self.spec.num_classes, *self.spec.input_shape[1:]

    def losses(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none").mean((1, 2))

    def scores(self, outputs, targets):
        return (outputs.argmax(1) == targets).double().mean((1, 2))

    def check(self, targets):
        if targets.dtype != torch.long or targets.shape[1:] != self.spec.input_shape[1:]:
            raise BadTargets("targets must have a class for each pixel")

    def example(self, count=2):
        return torch.zeros(count, *self.spec.input_shape[1:], dtype=torch.long)


class Wild(Pixels):
    def scores(self, outputs, targets):
        return 7 * super().scores(outputs, targets)


class Right(Metric):
    """How many pixels are right."""

    def sums(self, scores, targets):
        return torch.stack([(scores.argmax(1) == targets).double().mean((1, 2)).sum()])

    def value(self, sums):
        return float(sums[0])


def per_pixel(spec):
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 2, 1))


def run(folder, task, **more):
    given = SMALL | {"task": task, "dataset": f"test_learning:{TASKS[task]}"}
    given |= {"station-rounds": 1, "local-epochs": 8, "batch-size": 8}
    if "Pixels" in task:
        given |= {"model": "test_learning:per_pixel", "metrics": "test_learning:Right"}
    return run_locally(given | more | {"output": str(folder), "run-name": "run"})


@pytest.mark.parametrize("task", TASKS)
def test_a_run_learns_the_task_and_names_its_measure(tmp_path, task, capsys):
    summary = run(tmp_path, task)
    name = build_task(small_settings(task=task), numbers().spec).measure
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert not last["failures"] and last["moved"] is not None
    assert last["unseen"]["loss"] < 0.5, "a constant answer has about 0.67, 0.64 or more"
    assert last["source"]["measure"] == last["unseen"]["measure"] == name
    assert summary["best_by_source"]["source_accuracy"] > 0.6
    assert f"source {name}"[:12] in capsys.readouterr().out
    page = render([read_run(tmp_path / "run")])
    assert f"best source {name}" in page and "Confusion" not in page


def test_a_line_of_a_classifier_has_no_new_field(tmp_path):
    run_locally(SMALL | {"rounds": 1, "output": str(tmp_path), "run-name": "run"})
    text = (tmp_path / "run" / "rounds.jsonl").read_text()
    assert "measure" not in text


@pytest.mark.parametrize("method", ["fedsr", "fediir", "gperxan"])
def test_methods_for_classes_are_refused_by_name(method):
    with pytest.raises(UserError, match=f"client-method: '{method}' is defined for classes"):
        build_method(small_settings(client_method=method, task="regression"))


@pytest.mark.parametrize("metric", ["f1", "auc", "accuracy"])
def test_metrics_for_classes_are_refused_by_name(metric):
    with pytest.raises(UserError, match=f"metrics: '{metric}' is defined for classes"):
        build_metrics(small_settings(metrics=metric, task="multi-label"), labels().spec)


@pytest.mark.parametrize(
    "task, data, says",
    [
        ("classification", "numbers", "task=regression"),
        ("multi-label", "masks", "shape \\(examples, 2\\)"),
        ("regresion", "numbers", "Did you mean 'regression'"),
        ("test_learning:masks", "masks", "must be a subclass of"),
    ],
)
def test_data_of_another_task_are_refused_before_round_1(task, data, says):
    settings = small_settings(task=task, dataset=f"test_learning:{data}")
    with pytest.raises(UserError, match=says):
        load_data(settings)


def test_scores_that_are_no_shares_are_refused(tmp_path):
    given = {"dataset": "test_learning:masks", "model": "test_learning:per_pixel"}
    with pytest.raises(UserError, match="scores of Wild must return a number from 0 to 1"):
        run_locally(SMALL | given | {"task": "test_learning:Wild", "output": str(tmp_path)})


def test_a_model_with_outputs_of_another_shape_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"it must return a Tensor of shape \(2, 2, 8, 8\)"):
        run(tmp_path, "test_learning:Pixels", model="helpers:tiny_net", metrics="")


def test_an_output_that_is_not_finite_scores_nothing():
    data = numbers()
    task = build_task(small_settings(task="regression"), data.spec)
    batches = Batches(data.domains["a"], data.spec, 50, torch.device("cpu"))

    class Broken(nn.Module):
        def forward(self, inputs):
            return torch.full((len(inputs), 1), float("nan"))

    assert evaluate(Broken(), batches, task=task).correct == 0


def test_an_owner_must_allow_the_code_of_a_task_and_of_an_augmentation():
    settings = small_settings(
        dataset="digits", model="lenet5", task="lab:Task", augment="flip,lab:jitter"
    )
    assert set(own_code(settings)) == {("task", "lab:Task"), ("augment", "lab:jitter")}
    with pytest.raises(PolicyRefusal, match="lab:Task"):
        check(Policy(), settings)


def test_sums_of_scores_are_bounded_by_the_examples():
    said = {"correct": 2.5, "num-examples": 4.0, "correct/a": 2.5, "num-examples/a": 4.0}
    assert read_counts(said, 10, graded=True) == said
    for bad in ({"correct": 4.1}, {"correct": -0.1}, {"correct/a": 2.0}, {"num-examples": 3.5}):
        with pytest.raises(BadReply):
            read_counts(said | bad, 10, graded=True)
    with pytest.raises(BadReply):
        read_counts(said, 10)


def test_scores_shrink_with_the_examples_that_are_not_believed():
    counts = [{"num-examples": n, "correct": 0.99 * n} for n in (7.0, 10.0, 1001.0)]
    last = bounded_counts(counts, 1.55)[-1]
    assert last["num-examples"] == 15 and last["correct"] == pytest.approx(0.99 * 15)


def jitter(inputs, targets, generator):
    return inputs + torch.rand(len(inputs), 1, 1, 1, generator=generator), targets


def half(inputs, targets, generator):
    return inputs[::2], targets[::2]


def test_only_training_batches_are_augmented_and_a_seed_repeats_them():
    data, cpu = tiny_data(), torch.device("cpu")
    changes = find_augmentations(small_settings(augment="flip, test_learning:jitter"))

    def epoch(seed, some):
        return torch.cat([x for x, _ in Batches(data.domains["a"], data.spec, 32, cpu, seed, some)])

    assert torch.equal(epoch(3, changes), epoch(3, changes))
    assert not torch.equal(epoch(3, changes), epoch(3, ()))
    assert torch.equal(epoch(None, changes), data.domains["a"].inputs)


def test_every_epoch_is_augmented_anew():
    data, changes = tiny_data(), find_augmentations(small_settings(augment="noise"))
    batches = Batches(data.domains["a"], data.spec, 200, torch.device("cpu"), 3, changes)
    first, second = (next(iter(batches))[0].sort(0).values for _ in range(2))
    assert not torch.allclose(first, second)


def test_a_run_with_augmentation_repeats_and_differs_from_one_without(tmp_path):
    def loss(name, **more):
        given = SMALL | {"rounds": 1, "station-rounds": 1, "run-name": name} | more
        return run_locally(given | {"output": str(tmp_path)})["last"]["loss"]

    assert loss("one", augment="crop") == loss("two", augment="crop") != loss("three")


def test_a_client_augments_no_grams_and_no_evaluation(monkeypatch):
    asked = []
    monkeypatch.setattr("client_app.client.find_augmentations", lambda s: asked.append(s) or [])
    work = LocalWork.__new__(LocalWork)
    data = tiny_data()
    work.settings, work.device = small_settings(augment="flip"), torch.device("cpu")
    work.data = type("Data", (), {"train": data.domains["a"], "spec": data.spec})
    work.batches()
    assert not asked
    work.batches(5)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "augment, says",
    [
        ("flop", "Did you mean 'flip'"),
        ("test_learning:numbers", "cannot be called as needed"),
        ("test_learning:half", "of as many examples"),
    ],
)
def test_a_wrong_augmentation_is_refused_before_round_1(tmp_path, augment, says):
    with pytest.raises(UserError, match=says):
        run_locally(SMALL | {"augment": augment, "output": str(tmp_path)})


def test_dp_sgd_refuses_augmentation():
    with pytest.raises(UserError, match="augment: got 'flip'; DP-SGD"):
        small_settings(augment="flip", dp_sgd=True, **{"privacy.epsilon": 8.0})


def test_frozen_activations_refuse_augmentation():
    with pytest.raises(UserError, match="augment: got 'flip'; with train-only"):
        small_settings(augment="flip", train_only="6")
