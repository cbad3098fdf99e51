"""Learning tasks: losses, bounded scores, and targets that are refused by name."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, r2_score

from hfedatm_core.data import DataSpec
from hfedatm_core.data.split import split_validation
from hfedatm_core.tasks import CLASSES, BadTargets, Classification
from hfedatm_core.tasks.multi_label import MultiLabel
from hfedatm_core.tasks.regression import Regression

LABELS = MultiLabel(DataSpec("vector", 4, (3,)))
NUMBERS = Regression(
    DataSpec("vector", input_shape=(3,), outputs=2, target_mean=(50.0,), target_std=(10.0, 5.0))
)


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_classification_has_the_bits_of_cross_entropy():
    outputs, targets = drawn(0, 37, 5), torch.arange(37) % 5
    assert torch.equal(CLASSES.loss(outputs, targets), F.cross_entropy(outputs, targets))
    total = F.cross_entropy(outputs, targets, reduction="sum")
    assert torch.equal(CLASSES.total_loss(outputs, targets), total)
    right = outputs.argmax(1) == targets
    assert torch.equal(CLASSES.scores(outputs, targets), right.float())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 20), st.floats(0.01, 100))
def test_scores_lie_between_0_and_1_and_the_mean_of_losses_is_the_loss(seed, count, size):
    outputs = size * drawn(seed, count, 4)
    cases = [
        (Classification(DataSpec("vector", 4, (3,))), torch.arange(count) % 4),
        (LABELS, (drawn(seed + 1, count, 4) > 0).float()),
        (Regression(DataSpec("vector", outputs=4, input_shape=(3,))), drawn(seed + 1, count, 4)),
    ]
    for task, targets in cases:
        task.check(targets)
        scores, losses = task.scores(outputs, targets), task.losses(outputs, targets)
        assert scores.shape == losses.shape == (count,)
        assert float(scores.min()) >= 0 and float(scores.max()) <= 1
        torch.testing.assert_close(task.loss(outputs, targets), losses.mean())
        torch.testing.assert_close(task.total_loss(outputs, targets), losses.sum())


def test_the_score_of_a_regression_is_r2_while_no_example_is_far_off():
    targets = drawn(3, 500, 1)
    targets = (targets - targets.mean()) / targets.std(correction=0)
    outputs = targets + 0.1 * drawn(4, 500, 1)
    task = Regression(DataSpec("vector", outputs=1, input_shape=(3,)))
    expected = r2_score(targets.numpy(), outputs.numpy())
    assert float(task.scores(outputs, targets).mean()) == pytest.approx(expected, abs=1e-5)


def test_a_regression_learns_in_units_of_the_spread_and_answers_in_those_of_the_targets():
    targets = torch.tensor([[60.0, 45.0]])
    perfect = torch.tensor([[1.0, -1.0]])
    assert float(NUMBERS.loss(perfect, targets)) == 0
    assert NUMBERS.scores(perfect, targets).tolist() == [1.0]
    assert torch.equal(NUMBERS.predict(perfect), targets)


def test_the_score_of_labels_is_f1_by_example():
    outputs, targets = drawn(5, 60, 4), drawn(6, 60, 4) > 0.5
    expected = f1_score(targets, outputs > 0, average="samples", zero_division=1)
    assert float(LABELS.scores(outputs, targets).mean()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "task, targets, says",
    [
        (CLASSES, torch.rand(5, 1), "task=regression"),
        (Classification(NUMBERS.spec), torch.zeros(5).long(), "needs num_classes"),
        (NUMBERS, torch.rand(5), "targets.float().view(-1, 2)"),
        (NUMBERS, torch.rand(5, 2).double(), "torch.float32 of shape (examples, 2)"),
        (NUMBERS, torch.full((5, 2), float("nan")), "NaN or infinite"),
        (NUMBERS, torch.full((5, 2), 1e6), "set both in the DataSpec"),
        (LABELS, torch.zeros(5).long(), "shape (examples, 4)"),
        (LABELS, torch.full((5, 4), 0.5), "neither 0 nor 1"),
    ],
)
def test_targets_of_another_task_are_refused(task, targets, says):
    with pytest.raises(BadTargets) as found:
        task.check(targets)
    assert says in str(found.value)


def test_validation_has_small_and_large_numbers():
    targets = torch.arange(100.0)[torch.randperm(100)].view(-1, 1) + torch.zeros(100, 2)
    _, held = split_validation(NUMBERS.strata(targets), 0.1, seed=0)
    found = sorted(targets[held, 0].tolist())
    assert [int(value) // 10 for value in found] == list(range(10))


def test_validation_has_every_combination_of_labels():
    targets = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 0]]).repeat(20, 1)
    _, held = split_validation(LABELS.strata(targets), 0.1, seed=0)
    assert np.allclose(targets[held].float().mean(0), [0.5, 0.5, 0.5, 0.0])


@pytest.mark.parametrize(
    "given, says",
    [
        ({"num_classes": 3, "outputs": 2}, "num_classes or outputs, not both"),
        ({"outputs": -1}, "num_classes or outputs"),
        ({"outputs": 1, "target_std": (0.0,)}, "target_std must be positive"),
    ],
)
def test_a_spec_says_classes_or_outputs(given, says):
    with pytest.raises(ValueError, match=says):
        DataSpec("vector", input_shape=(3,), **given)
