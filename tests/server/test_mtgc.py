"""MTGC: corrections cancel in every group, and vanish where there is nothing to correct."""

import os
from pathlib import Path

import pytest
import torch
from helpers import (
    SMALL,
    SPEC,
    assert_same_model,
    last_model,
    lines_of,
    run_small,
    small_settings,
    tiny_net,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app.methods.fedavg import FedAvg
from hfedatm.base.building import build_rule
from hfedatm.base.errors import UserError
from hfedatm.base.memory import NodeMemory
from server_app.rules.mtgc import PREFIX, Corrected, distance

# Three clients per station and a fraction of examples that no batch size divides: clients differ in
# size and in their number of steps.
UNEQUAL = {"clients-per-station": 3, "lambda": 0.3, "batch-size": 16, "rounds": 3}


def only_run() -> str:
    """Name under which the nodes of this test's only run keep their memories."""
    (folder,) = Path(os.environ["HFEDATM_STATE"]).iterdir()
    return folder.name


def client_memory(client: int, round: int, station_round: int):
    kept = NodeMemory(only_run(), f"client-{client}").load(before=(round, station_round + 1))
    assert tuple(kept[f"{PREFIX}moment"].tolist()) == (round, 0, station_round)
    return kept


def examples_of(client: int, **given) -> int:
    from client_app.data import client_data

    return len(client_data(small_settings(**given), client, {}).train)


def underscored(settings):
    return {key.replace("-", "_"): value for key, value in settings.items()}


def test_corrections_of_a_station_cancel_in_the_weights_of_its_mean(tmp_path):
    run_small(tmp_path, "run", server_rule="mtgc", **underscored(UNEQUAL))
    for station in range(2):
        clients = range(3 * station, 3 * station + 3)
        kept = [client_memory(c, 3, 2) for c in clients]
        weights = [examples_of(c, **underscored(UNEQUAL)) for c in clients]
        names = [n for n in kept[0] if n.startswith(f"{PREFIX}z.")]
        assert len(names) == 6
        for name in names:
            terms = [w * k[name].double() for w, k in zip(weights, kept, strict=True)]
            scale = sum(t.abs().max() for t in terms)
            assert scale > 1e-3, f"{name} is not corrected at all"
            assert sum(terms).abs().max() < 1e-4 * scale


def test_corrections_of_the_stations_cancel_in_the_weights_of_the_global_mean(tmp_path):
    folder = run_small(tmp_path, "run", server_rule="mtgc", **underscored(UNEQUAL))
    kept = [NodeMemory(only_run(), f"station-{e}-rule").load(before=(4, 0)) for e in range(2)]
    last = lines_of(folder)[-1]["per_station"]
    weights = [station["num-examples"] for station in last]
    for name in (n for n in kept[0] if n.startswith("y.")):
        terms = [w * k[name].double() for w, k in zip(weights, kept, strict=True)]
        scale = sum(t.abs().max() for t in terms)
        assert scale > 1e-4
        assert sum(terms).abs().max() < 1e-4 * scale


def test_first_round_with_one_station_round_is_hierfavg(tmp_path):
    given = {"rounds": 1, "station_rounds": 1}
    mtgc = run_small(tmp_path, "mtgc", server_rule="mtgc", **given)
    avg = run_small(tmp_path, "avg", server_rule="avg", **given)
    assert_same_model(mtgc, avg)


def test_a_single_client_has_nothing_to_correct(tmp_path):
    given = {"stations": 1, "clients_per_station": 1, "rounds": 3}
    mtgc = run_small(tmp_path, "mtgc", server_rule="mtgc", **given)
    avg = run_small(tmp_path, "avg", server_rule="avg", **given)
    assert_same_model(mtgc, avg)


def test_later_rounds_differ_from_hierfavg(tmp_path):
    mtgc = last_model(run_small(tmp_path, "mtgc", server_rule="mtgc"))
    avg = last_model(run_small(tmp_path, "avg", server_rule="avg"))
    assert any(not torch.allclose(mtgc[n], avg[n], atol=1e-4) for n in avg)


def test_z_is_reset_in_a_new_global_round_and_kept_when_a_station_round_was_missed():
    model = tiny_net(SPEC)
    received = {n: p.detach().clone() for n, p in model.named_parameters()}

    def sent(*moment):
        return {
            f"{PREFIX}moment": torch.tensor(moment),
            f"{PREFIX}distance": torch.tensor(0.5, dtype=torch.float64),
        }

    kept = {f"{PREFIX}moment": torch.tensor([2, 0, 1])}
    kept |= {f"{PREFIX}z.{n}": torch.ones_like(p) for n, p in received.items()}
    kept |= {f"{PREFIX}x.{n}": p + 1 for n, p in received.items()}

    # global round, where the station's job began, station round; (2, 1, 2) is a new job in round 2
    for moment, expected in {
        (2, 0, 2): 3.0,
        (2, 0, 3): 1.0,
        (3, 0, 1): 0.0,
        (2, 1, 2): 0.0,
    }.items():
        method = Corrected(FedAvg())
        method.begin(model, sent(*moment), kept)
        z = method.remember()[f"{PREFIX}z.0.weight"]
        assert torch.allclose(z, torch.full_like(z, expected), atol=1e-5), moment


def test_a_step_follows_gradient_plus_both_corrections():
    model = tiny_net(SPEC)
    y = {f"{PREFIX}y.{n}": torch.full_like(p, 2.0) for n, p in model.named_parameters()}
    method = Corrected(FedAvg())
    method.begin(
        model,
        {
            f"{PREFIX}moment": torch.tensor([1, 0, 1]),
            f"{PREFIX}distance": torch.tensor(0.0, dtype=torch.float64),
            **y,
        },
        {},
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    method.correct(model)
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in model.parameters())
    assert method.metrics() == {"steps": 1}


@settings(max_examples=30)
@given(
    lr=st.floats(1e-4, 1.0),
    momentum=st.floats(0.0, 0.95),
    steps=st.integers(1, 40),
)
def test_distance_is_how_far_sgd_moves_along_a_constant_gradient(lr, momentum, steps):
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=lr, momentum=momentum)
    for _ in range(steps):
        weight.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
    assert distance(lr, momentum, steps) == pytest.approx(-float(weight.detach()), rel=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimizer": "adamw"}, "optimizer"),
        ({"train_fn": "a:b"}, "train-fn"),
        ({"dp_sgd": True, "privacy.epsilon": 1.0}, "dp-sgd"),
    ],
)
def test_settings_without_plain_steps_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        build_rule(small_settings(server_rule="mtgc", **given))


def test_works_around_a_method_with_memory_and_sharing_of_its_own(tmp_path):
    for method in ("fedsr", "fediir"):
        folder = run_small(tmp_path, method, server_rule="mtgc", client_method=method)
        rounds = lines_of(folder)
        assert len(rounds) == SMALL["rounds"]
        assert not any(r["failures"] for r in rounds)


def test_resumed_run_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    import hfedatm.runtime.local as local
    from hfedatm.base.results import RunFolder

    whole = run_small(tmp_path, "whole", server_rule="mtgc", rounds=3)
    save = RunFolder.save_round

    def save_and_stop(self, record, *rest):
        save(self, record, *rest)
        if record.round == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save_round", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run_small(tmp_path, "stopped", server_rule="mtgc", rounds=3)
    monkeypatch.setattr(RunFolder, "save_round", save)
    local.run_locally({"resume": str(tmp_path / "stopped")})
    assert_same_model(whole, tmp_path / "stopped")
