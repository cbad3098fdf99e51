"""Metrics from sums: they add up, and what they give is what all examples at one place give."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

from hfedatm_core.metrics.accuracy import Accuracy
from hfedatm_core.metrics.auc import BINS, Auc
from hfedatm_core.metrics.f1 import F1

METRICS = (Accuracy, Auc, F1)


def make(seed: int, classes: int, examples: int = 60):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (examples,), generator=generator)
    scores = 3 * torch.randn(examples, classes, generator=generator)
    scores[torch.arange(examples), targets] += 1
    return scores, targets


cases = given(seed=st.integers(0, 10**6), classes=st.integers(2, 5), cut=st.integers(0, 60))


@pytest.mark.parametrize("kind", METRICS)
@cases
def test_sums_of_parts_add_up_and_stay_within_the_examples(kind, seed, classes, cut):
    scores, targets = make(seed, classes)
    metric = kind(classes)
    whole = metric.sums(scores, targets)
    parts = metric.sums(scores[:cut], targets[:cut]) + metric.sums(scores[cut:], targets[cut:])
    assert torch.equal(whole, parts) and metric.nothing().shape == whole.shape
    assert 0 <= whole.min() and whole.max() <= len(targets) and not metric.nothing().any()


@cases
def test_f1_and_accuracy_are_those_of_all_examples_together(seed, classes, cut):
    scores, targets = make(seed, classes)
    targets[:cut] = 0  # so that classes may be missing
    predicted = scores.argmax(1)
    f1, accuracy = F1(classes), Accuracy(classes)
    macro = f1_score(targets, predicted, average="macro", zero_division=0)
    assert f1.value(f1.sums(scores, targets)) == pytest.approx(macro)
    right = accuracy_score(targets, predicted)
    assert accuracy.value(accuracy.sums(scores, targets)) == pytest.approx(right)


@cases
def test_the_area_is_off_by_no_more_than_pairs_in_one_bin(seed, classes, cut):
    scores, targets = make(seed, classes)
    metric = Auc(classes)
    sums = metric.sums(scores, targets)
    own, rest = sums.view(2, classes, BINS)
    exact, slack = [], []
    for one in range(classes):
        if 0 < own[one].sum() < len(targets):
            others = torch.cat([scores[:, :one], scores[:, one + 1 :]], 1).double().logsumexp(1)
            odds = scores[:, one].double() - others
            exact.append(roc_auc_score(targets == one, odds))
            slack.append(float((own[one] * rest[one]).sum() / own[one].sum() / rest[one].sum()) / 2)
    mean, most = sum(exact) / len(exact), sum(slack) / len(slack)
    assert abs(metric.value(sums) - mean) <= most + 1e-9


@pytest.mark.parametrize("kind", METRICS)
def test_of_no_examples_nothing_is_known(kind):
    metric = kind(3)
    assert math.isnan(metric.value(metric.nothing()))


def test_f1_is_not_the_mean_of_the_clients_f1():
    first, second = make(1, 3, 10), make(2, 3, 50)
    second[0][:, 2] += 9  # a client whose model always says 2
    metric = F1(3)
    one, other = (metric.sums(*part) for part in (first, second))
    of_all = metric.value(one + other)
    mean = (10 * metric.value(one) + 50 * metric.value(other)) / 60
    assert abs(of_all - mean) > 0.01
