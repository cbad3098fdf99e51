"""ELCFS: amplitudes are exchanged, phases stay, and every client's amplitudes stay apart."""

import numpy as np
import pytest
import torch
from helpers import (
    SMALL,
    SPEC,
    Saboteur,
    ask_client,
    failures_of,
    last_model,
    lines_of,
    log_lines,
    run_small,
    small_settings,
    tiny_batches,
    tiny_net,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import hfedatm.runtime.local as local
from client_app.methods.elcfs import ELCFS, MOST_TIMES, interpolated, low_amplitudes
from hfedatm.base.building import build_method, build_model
from hfedatm.base.errors import UserError
from hfedatm.base.records import record_to_state, state_to_record
from hfedatm_core import MeanAccumulator

METHOD = {"client_method": "elcfs", "server_rule": "avg"}


def images(seed, count=3, size=(8, 8)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, 2, *size), generator=generator, dtype=torch.float64)


def by_numpy(image, other, v, reach):
    """Return one changed channel, frequency by frequency."""
    spectrum, result = np.fft.fft2(image), None
    height, width = image.shape
    result = spectrum.copy()
    for f in range(-reach[0], reach[0] + 1):
        for g in range(-reach[1], reach[1] + 1):
            own = spectrum[f % height, g % width]
            amplitude = (1 - v) * abs(own) + v * other[f + reach[0], g + reach[1]]
            result[f % height, g % width] = amplitude * np.exp(1j * np.angle(own))
    return np.fft.ifft2(result)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 99),
    st.sampled_from([(8, 8), (7, 9), (6, 5)]),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.15, 0.3, 0.49]),
)
def test_interpolation_is_that_of_a_direct_computation(seed, shape, v, size):
    own, other = images(seed, 2, shape), low_amplitudes(images(seed + 1, 2, shape), size)
    found = interpolated(own, other, torch.tensor([v, v / 2], dtype=torch.float64), size)
    reach = [min(int(size * n), (n - 1) // 2) for n in shape]
    for i, share in enumerate((v, v / 2)):
        for c in range(2):
            wanted = by_numpy(own[i, c].numpy(), other[i, c].numpy(), share, reach)
            assert np.abs(wanted.imag).max() < 1e-9  # the changed image is real
            assert np.allclose(found[i, c].numpy(), wanted.real, atol=1e-9)


def test_no_way_is_no_change_and_the_whole_way_has_the_others_amplitudes():
    own, others = images(0), low_amplitudes(images(1), 0.2)
    assert torch.allclose(interpolated(own, others, torch.zeros(3), 0.2), own)
    changed = interpolated(own, others, torch.ones(3, dtype=torch.float64), 0.2)
    assert torch.allclose(low_amplitudes(changed, 0.2), others)
    before, after = torch.fft.fft2(own), torch.fft.fft2(changed)
    same_phase = (before / before.abs() - after / after.abs()).abs()
    assert float(same_phase.max()) < 1e-6


def method(client, clients=4, **options):
    made = ELCFS(**options)
    made.client, made.clients = client, clients
    return made


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=4, max_size=4))
def test_means_at_both_tiers_keep_clients_apart(examples):
    shared = [method(c).share(tiny_net(SPEC), tiny_batches(2, seed=c)) for c in range(4)]
    total = MeanAccumulator()
    for pair in ((0, 1), (2,)):  # two stations; client 3 is away
        station = MeanAccumulator()
        for c in pair:
            station.add(shared[c], examples[c], str(c))
        total.add(station.result(), sum(examples[c] for c in pair), str(pair))
    bank = method(0).blend({}, total.result())
    for c in range(3):
        assert torch.allclose(bank["bank"][c], shared[c]["bank"][c], rtol=1e-4)
    assert bank["present"].tolist() == [1, 1, 1, 0]
    alone = MeanAccumulator()
    alone.add(shared[3], 7, "3")
    later = method(0).blend(bank, alone.result())
    assert later["present"].tolist() == [1, 1, 1, 1]
    assert torch.equal(later["bank"][:3], bank["bank"][:3])
    assert torch.allclose(later["bank"][3], shared[3]["bank"][3], rtol=1e-4)


def test_a_client_never_meets_its_own_amplitudes():
    one = method(1, clients=3)
    bank = torch.arange(3.0).view(3, 1, 1, 1, 1) * torch.ones(3, 4, 1, 1, 1)
    one.begin(tiny_net(SPEC), {"bank": bank, "present": torch.ones(3)}, {})
    assert set(one._others.flatten().tolist()) == {0.0, 2.0}
    alone = method(0, clients=1)
    alone.begin(tiny_net(SPEC), {"bank": bank[:1], "present": torch.ones(1)}, {})
    ((inputs, targets),) = tiny_batches(1)
    model = tiny_net(SPEC)
    assert torch.equal(
        alone.loss(model, inputs, targets),
        torch.nn.functional.cross_entropy(model(inputs), targets),
    )


def test_the_loss_is_the_mean_of_both_losses():
    one = method(0, clients=2)
    ((inputs, targets),) = tiny_batches(1)
    shared = method(1, clients=2).share(tiny_net(SPEC), tiny_batches(2, seed=5))
    model = tiny_net(SPEC)
    one.begin(model, method(1, clients=2).blend({}, shared), {})
    torch.manual_seed(3)
    found = one.loss(model, inputs, targets)
    torch.manual_seed(3)
    drawn, way = torch.randint(4, (len(inputs),)), None
    way = torch.rand(len(inputs))
    changed = interpolated(inputs, shared["bank"][1][drawn], way, 0.1)
    loss = torch.nn.functional.cross_entropy
    assert torch.allclose(found, (loss(model(inputs), targets) + loss(model(changed), targets)) / 2)
    assert not torch.allclose(changed, inputs)


def test_amplitudes_of_others_are_not_negative_and_not_huge():
    ((inputs, targets),) = tiny_batches(1)
    model, shape = tiny_net(SPEC), low_amplitudes(inputs, 0.1).shape[1:]
    most = MOST_TIMES * float(low_amplitudes(inputs, 0.1).amax())

    def loss(value):
        one = method(0, clients=2)
        bank = torch.full((2, 4, *shape), value)
        one.begin(model, {"bank": bank, "present": torch.ones(2)}, {})
        torch.manual_seed(3)
        return float(one.loss(model, inputs, targets).detach())

    assert loss(-1e9) == loss(float("nan")) == loss(float("inf")) == loss(0.0)
    assert loss(1e30) == loss(most) != loss(most / 2)


def test_a_run_exchanges_amplitudes_and_says_so(tmp_path):
    with log_lines() as lines:
        folder = run_small(tmp_path, "elcfs", **METHOD)
    assert any("clients also send: amplitudes" in line for line in lines)
    assert not any(line["failures"] for line in lines_of(folder))
    plain = last_model(run_small(tmp_path, "plain", server_rule="avg"))
    assert any(not torch.equal(plain[n], v) for n, v in last_model(folder).items())


@pytest.mark.parametrize("rule", ["hfedatm", "mtgc"])
def test_it_goes_with_rules_that_wrap_methods(tmp_path, rule):
    folder = run_small(tmp_path, client_method="elcfs", server_rule=rule)
    assert not any(line["failures"] for line in lines_of(folder))


def spoiling(change):
    def spoil(message, reply):
        state = record_to_state(reply.content["shared"])
        reply.content["shared"] = state_to_record({n: change(v) for n, v in state.items()})
        return reply

    return spoil


@pytest.mark.parametrize(
    ("change", "dropped"),
    [
        (lambda v: v * float("nan"), True),
        (lambda v: v[:1], True),
        (lambda v: v - 1e9, False),
        (lambda v: v * 0, False),
    ],
)
def test_hostile_amplitudes_harm_nobody(tmp_path, monkeypatch, change, dropped):
    saboteur = Saboteur(spoiling(change), {1}, "train.prepare")
    monkeypatch.setattr(local, "client_app", saboteur)
    folder = run_small(tmp_path, **METHOD, bound_factor=0)
    assert bool(failures_of(folder)) == dropped
    assert {f["node"].split(", ")[-1] for f in failures_of(folder)} <= {"client 1"}
    assert not any(line.get("kept") for line in lines_of(folder))
    assert all(bool(torch.isfinite(v).all()) for v in last_model(folder).values())


def test_amplitudes_leave_only_if_the_owner_allows_it(policy):
    chosen = small_settings(**METHOD)
    model = build_model(chosen, SPEC, build_method(chosen, SPEC)).state_dict()
    own = [SMALL["dataset"], SMALL["model"]]
    policy(code={"allowed": own})
    refused = ask_client(chosen, 0, model, "train.prepare")
    assert "privacy.amplitudes" in refused["failure"]["reason"]
    policy(code={"allowed": own}, privacy={"amplitudes": True})
    sent = record_to_state(ask_client(chosen, 1, model, "train.prepare")["shared"])
    assert sent["present"].tolist() == [0, 1, 0, 0]


def test_inputs_that_are_no_images_are_refused():
    with pytest.raises(UserError, match="images"):
        method(0).share(tiny_net(SPEC), [(torch.zeros(4, 7), torch.zeros(4))])
