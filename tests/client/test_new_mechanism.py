"""A mechanism is one file: everything that depends on it reads its class, and none its name."""

import ast
import math
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from helpers import lines_of, run_small, small_settings
from test_promised_noise import HUGE, SIGMA, SIZES, Lab, examples, gaussian_epsilon, settings_of

from client_app.ledger import LedgerFile
from client_app.private_release import ClientPrivacy
from hfedatm.base.describing import describe
from hfedatm.base.privacy_settings import statement
from hfedatm.base.records import Task
from hfedatm.base.settings import SettingsError
from hfedatm.base.trust import policy as policies
from hfedatm.base.trust.checking import check
from hfedatm.base.trust.policy import Policy, PolicyRefusal
from hfedatm_core import Gram
from hfedatm_core.privacy import mechanisms
from hfedatm_core.privacy.mechanisms import find_mechanism
from hfedatm_core.privacy.mechanisms.base import Hidden, Mechanism
from hfedatm_core.privacy.noise import NoiseSource
from hfedatm_core.privacy.release import GramRelease

ROOT = Path(__file__).parents[2]
TRACE = '''
"""Hide a client: the trace of its Gram is clipped, which is no smaller than its Frobenius norm."""

from dataclasses import dataclass

from hfedatm_core.privacy.mechanisms.base import Mechanism


@dataclass(frozen=True)
class Trace(Mechanism):
    """The client's Gram, its trace clipped to ``clip``."""

    hides = "client"
    whom = "one client's Gram"

    def bounded(self, gram, examples):
        """Return the Gram, scaled down if its trace is too large."""
        trace = float(gram.diagonal().double().sum())
        return gram.triangle.double() * min(1.0, self.clip * (1 - 1e-12) / max(trace, 1e-300))

    def largest(self, dim):
        """Return the bound of the trace."""
        return self.clip
'''
NOISED = {"privacy.mechanism": "trace", "privacy.sigma": SIGMA}


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """Add the file to the folder of mechanisms, as somebody who writes one would."""
    folder = tmp_path / "mechanisms"
    folder.mkdir()
    (folder / "trace.py").write_text(TRACE)
    monkeypatch.setattr(mechanisms, "__path__", [*mechanisms.__path__, str(folder)])
    yield
    find_mechanism.cache_clear()
    sys.modules.pop("hfedatm_core.privacy.mechanisms.trace", None)


def test_a_name_without_a_file_is_refused_and_one_with_a_file_is_listed(trace):
    with pytest.raises(SettingsError, match=r"'client', 'example', 'none', 'paper', 'trace'"):
        small_settings(**{"privacy.mechanism": "tracing"})
    small_settings(**NOISED)
    (allowed,) = [row["allowed"] for row in describe() if row["key"] == "privacy.mechanism"]
    assert allowed == "client | example | none | paper | trace"


def test_settings_that_it_has_no_field_for_are_refused(trace):
    with pytest.raises(SettingsError, match="only privacy.mechanism = 'paper' bounds the rank"):
        small_settings(**NOISED, **{"privacy.rank": 2})
    with pytest.raises(SettingsError, match="only for gram-weights = 'uniform'"):
        small_settings(**NOISED, **{"secure-aggregation": True, "gram-weights": "examples"})
    assert "noised to hide one client's Gram" in statement(small_settings(**NOISED))


def test_an_owner_who_wants_the_client_hidden_takes_it(trace):
    own = policies.Code(allowed=("helpers:tiny_data", "helpers:tiny_net"))
    asked = policies.Privacy(least_mechanism="client", most_clip=1.0)
    owners = Policy(code=own, privacy=asked)
    check(owners, small_settings(**NOISED), grams=True)
    with pytest.raises(PolicyRefusal, match="most-clip"):
        check(owners, small_settings(**NOISED, **{"privacy.clip": 2.0}), grams=True)
    with pytest.raises(PolicyRefusal, match="client or stronger"):
        check(owners, small_settings(), grams=True)


@pytest.mark.parametrize("dp_sgd", [False, True])
def test_its_noise_hides_what_the_ledger_says(trace, monkeypatch, dp_sgd):
    settings = settings_of(**NOISED, **{"dp-sgd": dp_sgd, "gram-model": "station"})
    lab, count = Lab(monkeypatch), max(SIZES)
    clean, one = (lab.ask(settings, examples(count), noise) for noise in (0.0, 1.0))
    nobody = lab.ask(settings, examples(count, "nobody"), 0.0)
    for data in (examples(count), examples(count, HUGE)):
        seen, squares = lab.ask(settings, data, 0.0), 0.0
        for layers, gram in seen.grams.items():
            noise = float(np.abs(one.grams[layers] - clean.grams[layers])[0])
            distance = float(np.linalg.norm(gram - nobody.grams[layers]))
            assert 0 < distance <= noise / SIGMA / (math.sqrt(2) if dp_sgd else 1) * (1 + 1e-9)
            squares += (distance / noise) ** 2
        assert gaussian_epsilon(math.sqrt(squares)) <= seen.epsilon * (1 + 1e-6)


def test_in_the_account_of_the_data_it_counts_as_one_that_hides_the_client(trace, tmp_path):
    task = Task("measure", small_settings(**NOISED), 1, station_round=1, client=0)
    privacy = ClientPrivacy(task, 40, 2, LedgerFile(tmp_path))
    assert privacy.cost().releases == {(SIGMA, 1.0): 2}
    ((weaker, rate),) = privacy.cost_of_one_example().releases
    assert (weaker, rate) == (pytest.approx(SIGMA / math.sqrt(2)), 1.0)


def test_a_run_uses_it_and_its_stations_repair_what_the_noise_did(trace, tmp_path, monkeypatch):
    least, repaired = [], Mechanism.repaired

    def note(self, mean):
        after = repaired(self, mean)
        least.append([float(torch.linalg.eigvalsh(gram.dense())[0]) for gram in (mean, after)])
        return after

    monkeypatch.setattr(Mechanism, "repaired", note)
    (record,) = lines_of(run_small(tmp_path, rounds=1, **NOISED))
    assert record["failures"] == []
    assert record["privacy"]["epsilon"] > 0
    assert min(before for before, _ in least) < -0.1
    assert min(after for _, after in least) > -1e-4  # of rounding to float32


# --- one place


def test_the_order_of_the_mechanisms_is_that_of_the_policy():
    levels = get_args(Hidden)
    assert levels == get_args(policies.Privacy.model_fields["least_mechanism"].annotation)
    strength = {name: find_mechanism(name).hides for name in ("none", "example", "client", "paper")}
    assert strength == {"none": "none", "example": "example", "client": "client", "paper": "client"}
    for name, hides in strength.items():
        met = [find_mechanism(name)().hides_at_least(level) for level in levels]
        assert met == [levels.index(level) <= levels.index(hides) for level in levels]


def test_without_a_bound_no_noise_is_enough():
    release = GramRelease(find_mechanism("none")(), sigma=1.0)
    with pytest.raises(ValueError, match="must be finite"):
        release.privatise({"fc": Gram.from_dense(torch.eye(3))}, 3, NoiseSource())


def test_nobody_asks_for_the_name_of_a_mechanism():
    """Whoever has the settings asks the class: a name may be shown, and looked up in one place."""
    asked = []
    for package in ("hfedatm_core", "hfedatm", "client_app", "station_app", "server_app"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for line in _branches(path.read_text(encoding="utf-8")):
                asked.append(f"{path.relative_to(ROOT)}:{line}")
    assert asked == []
    assert _branches('if s.privacy_mechanism == "x": pass') == [1]
    assert _branches('{"x": 1}[s.privacy_mechanism]') == [1]
    assert _branches('{"x": 1}.get(s.privacy_mechanism)') == [1]
    assert _branches("match s.privacy_mechanism:\n    case 1: pass") == [1]
    assert _branches('f"{s.privacy_mechanism}"') == []


def _branches(text: str) -> list[int]:
    """Return the lines in which the name is compared, or anything is looked up by it."""
    kinds = (ast.Compare, ast.Subscript, ast.Match)
    found = []
    for node in ast.walk(ast.parse(text)):
        look_up = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get"
        if isinstance(node, kinds) or look_up:
            parts = [node.subject] if isinstance(node, ast.Match) else [node]
            inside = (inner for part in parts for inner in ast.walk(part))
            if any(getattr(i, "attr", "") == "privacy_mechanism" for i in inside):
                found.append(node.lineno)
    return found
