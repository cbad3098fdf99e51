"""For every combination of the privacy switches: what leaves a client hides what was promised.

The real client code runs on neighbouring data sets, once without noise (how far apart are the two
replies?) and once with all noise set to one (how large is it in the units of the reply?). The
quotient is what an attacker sees, and its epsilon is computed here without the project's code.
"""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from helpers import SPEC, ask_client, small_settings, tiny_net
from scipy.integrate import quad
from scipy.optimize import brentq
from torch import nn

import hfedatm.base.records
from client_app import secure
from client_app.app import app as client
from client_app.data import ClientData
from hfedatm.base.privacy_settings import secure_threshold
from hfedatm.base.records import Task, record_to_state, state_to_record
from hfedatm.base.settings import SettingsError
from hfedatm_core.data import Domain
from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.privacy.noise import NoiseSource

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

SIZES = (40, 16, 70)  # clients of one station, whose Grams are made of 16 examples each
DELTA = 1e-5
SIGMA, CLIP = 2.5, 0.7
SWITCHES = {
    "privacy.mechanism": ["none", "example", "client", "paper"],
    "dp-sgd": [False, True],
    "secure-aggregation": [False, True],
    "gram-weights": ["uniform", "examples"],
    "gram-model": ["client", "station"],
    "gram-batches": [0, 2],
    "gram-dtype": ["float32", "float16", "bfloat16"],
    "regmean-bias": ["mean", "exact"],
}


def combinations():
    """Yield all settings that promise something and are not refused."""
    for values in itertools.product(*SWITCHES.values()):
        given = dict(zip(SWITCHES, values, strict=True))
        if given["privacy.mechanism"] == "none" and not given["dp-sgd"]:
            continue
        try:
            yield given, settings_of(**given)
        except SettingsError:
            continue


def settings_of(**given):
    fixed = {
        "stations": 1,
        "clients-per-station": len(SIZES),
        "batch-size": 8,
        "privacy.sigma": SIGMA,
        "privacy.clip": CLIP,
        "privacy.delta": DELTA,
        "gram-min-rows": 1,
        "schedule": "constant",
        "lr": 1e-30,  # the guarantee of a Gram is about given weights
        "validation-fraction": 0,
        "model": "test_promised_noise:net",
    }
    return small_settings(**(fixed | given))


def net(spec) -> nn.Module:
    torch.manual_seed(0)
    return tiny_net(spec)


NULL, HUGE, RANDOM = "null", "huge", "random"


def examples(count: int, first: str | None = None, seed: int = 0) -> Domain:
    """Return a client's examples, the first of which (or all) may be another.

    One that is not a number contributes zeros: the neighbour of all others.
    """
    generator = torch.Generator().manual_seed(seed + count)
    inputs = torch.randn((count, *SPEC.input_shape), generator=generator)
    targets = torch.arange(count) % SPEC.num_classes
    if first == "nobody":
        inputs[:] = float("nan")
    elif first == NULL:
        inputs[0] = float("nan")
    elif first == HUGE:
        inputs[0] = 1e6
    elif first == RANDOM:
        inputs[0] = 5 * torch.randn(inputs[0].shape, generator=generator)
    return Domain("a", inputs, targets)


@dataclass
class Seen:
    """What leaves a client."""

    grams: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)
    model: np.ndarray | None = None
    loss: float = 0.0
    epsilon: float = 0.0


class Lab:
    """One client, asked again and again, with other data and other noise."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch
        self.runs = itertools.count()
        # What weights tell of an example is hidden by DP-SGD or not at all.
        monkeypatch.setattr("client_app.client.train_locally", lambda *_: 0.5)

    def ask(self, settings, data: Domain, noise: float, kind: str | None = None) -> Seen:
        self.patch.setattr("client_app.client.client_data", lambda *_: ClientData(SPEC, data, []))
        self.patch.setattr(NoiseSource, "normal", lambda _, count: np.full(count, noise))
        grams, vectors = [], []
        pack, flatten = hfedatm.base.records.grams_to_record, secure.flatten

        def note_grams(found, dtype):
            grams.append(found)
            return pack(found, dtype)

        def note_vector(*given):
            vectors.append(flatten(*given))
            return vectors[-1]

        kind = kind or ("measure" if settings.gram_model == "station" else "train")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hfedatm.base.records.grams_to_record", note_grams)
            patch.setattr("client_app.secure.flatten", note_vector)
            reply = self._reply(settings, kind)
        assert "failure" not in reply, reply["failure"]["reason"]
        seen = Seen(epsilon=reply["metrics"]["epsilon"])
        if settings.secure_aggregation:
            ((layout, vector),) = vectors
            return _of_vector(seen, layout, vector)
        for layers, gram in distinct(grams[0]).items() if grams else ():
            assert settings.privacy_mechanism == "none" or gram.dtype == torch.float64
            seen.grams[layers] = gram.triangle.double().numpy()
        if "model" in reply:
            seen.model = _flat(record_to_state(reply["model"]))
            seen.loss = reply["metrics"]["loss"]
        return seen

    def _reply(self, settings, kind) -> RecordDict:
        send = kind == "train" and settings.gram_model == "client"
        task = Task(
            kind, settings, 1, station=0, station_round=1, client=0,
            send_grams=send, run=f"run-{next(self.runs)}",
        )  # fmt: skip
        content = RecordDict(
            {"model": state_to_record(net(SPEC).state_dict()), "task": task.to_record()}
        )
        if settings.secure_aggregation:
            content["secure"] = ConfigRecord(start_of_a_sum(kind))
        context = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={})
        type_ = "train" if kind == "train" else f"train.{kind}"
        return client(Message(content, 0, type_), context).content


def start_of_a_sum(kind: str) -> dict:
    metrics = ["loss"] if kind == "train" else []
    return {"session": bytes(16), "asked": len(SIZES), "metrics": metrics}


def _flat(state) -> np.ndarray:
    return torch.cat([state[name].double().flatten() for name in sorted(state)]).numpy()


def _of_vector(seen: Seen, layout, vector) -> Seen:
    """Take apart what goes into a secure sum: numbers times examples, Grams times their weight."""
    at = 1
    for name in layout.metrics:
        if name == "loss":
            seen.loss = vector[at]
        at += 1
    arrays = sum(math.prod(shape) for *_, shape in layout.arrays)
    if arrays:
        seen.model = vector[at : at + arrays]
    at += arrays + bool(layout.grams)
    for layers, dim in layout.grams:
        size = dim * (dim + 1) // 2
        seen.grams[tuple(layers)] = vector[at : at + size]
        at += size
    assert at == vector.size
    return seen


def neighbours(mechanism: str, count: int):
    """Yield pairs of data sets of which one has nothing in the place of what is to be hidden."""
    if mechanism in ("client", "paper"):
        yield examples(count), examples(count, "nobody")
        yield examples(count, HUGE), examples(count, "nobody")
    else:
        yield examples(count, HUGE), examples(count, NULL)
        yield examples(count, RANDOM), examples(count, NULL)


# --- the independent computation


def gaussian_epsilon(mu: float, delta: float = DELTA) -> float:
    """Invert the hockey-stick divergence of N(mu, 1) from N(0, 1), integrated numerically."""

    def excess(epsilon: float) -> float:
        def density(x: float) -> float:
            upper = math.exp(-0.5 * (x - mu) ** 2)
            return max(0.0, upper - math.exp(epsilon - 0.5 * x * x)) / math.sqrt(2 * math.pi)

        start = epsilon / mu + mu / 2
        return quad(density, start, start + 40, limit=200, epsabs=1e-13)[0] - delta

    return brentq(excess, 1e-6, 60.0) if excess(1e-6) > 0 else 0.0


def composed_epsilon(parts: list[tuple[float, float, int]], delta: float = DELTA) -> float:
    """Return epsilon by privacy loss distributions and FFT.

    ``parts`` are (sigma, sample rate, count) of subsampled Gaussians. Both directions count.
    """
    step, half = 2e-3, 1 << 16
    return max(_composed(parts, delta, add, step, half) for add in (True, False))


def _composed(parts, delta, add, step, half):
    spectrum = np.ones(2 * half, dtype=complex)
    for sigma, rate, count in parts:
        x = np.linspace(-20 * sigma, 20 * sigma + 1, 400_001)
        width = x[1] - x[0]
        null = np.exp(-0.5 * (x / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        other = np.exp(-0.5 * ((x - 1) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        ratio = np.log1p(rate * np.expm1((2 * x - 1) / (2 * sigma**2)))
        mixed = (1 - rate) * null + rate * other
        density, loss = (mixed, ratio) if add else (null, -ratio)
        # shared among the two nearest bins, so that the mean stays where it is
        bins = np.clip(np.floor(loss / step), -half, half - 2)
        upper = np.clip(loss / step - bins, 0, 1)
        mass = sum(
            np.bincount((bins.astype(int) + more) % (2 * half), density * width * part, 2 * half)
            for more, part in ((0, 1 - upper), (1, upper))
        )
        spectrum *= np.fft.fft(mass / mass.sum()) ** count
    mass = np.clip(np.fft.ifft(spectrum).real, 0, None)
    losses = np.fft.fftfreq(2 * half, 1 / (2 * half)) * step

    def excess(epsilon: float) -> float:
        above = losses > epsilon
        return float((mass[above] * -np.expm1(epsilon - losses[above])).sum()) - delta

    return brentq(excess, 0.0, 60.0) if excess(0.0) > 0 else 0.0


def test_the_independent_computation_is_right():
    # sigma 1, delta 1e-5: epsilon 4.377 (Balle and Wang 2018); two ways to the same number
    assert gaussian_epsilon(1.0) == pytest.approx(4.377, abs=0.01)
    assert composed_epsilon([(1.0, 1.0, 1)]) == pytest.approx(gaussian_epsilon(1.0), abs=0.005)
    assert composed_epsilon([(2.0, 1.0, 4)]) == pytest.approx(gaussian_epsilon(1.0), abs=0.02)
    # Abadi et al. 2016: q = 0.01, sigma = 4, 10000 steps: 1.26 by moments, less in truth
    assert 0.9 < composed_epsilon([(4.0, 0.01, 10_000)]) < 1.26


# --- Grams

PROMISING = list(combinations())


@pytest.mark.parametrize(
    ("given", "settings"),
    [(g, s) for g, s in PROMISING if g["privacy.mechanism"] != "none"],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_grams_hide_as_much_as_the_ledger_says(given, settings, monkeypatch):
    lab = Lab(monkeypatch)
    clean = [lab.ask(settings, examples(n), 0.0) for n in SIZES]
    ones = [lab.ask(settings, examples(n), 1.0) for n in SIZES]
    spread = [
        {layers: np.abs(one.grams[layers] - none.grams[layers]) for layers in none.grams}
        for one, none in zip(ones, clean, strict=True)
    ]
    for stds in spread:
        for std in stds.values():
            assert std == pytest.approx(std[0], rel=1e-6), "all entries get the same noise"
    worst = SIZES.index(max(SIZES))
    for data, neighbour in neighbours(settings.privacy_mechanism, max(SIZES)):
        left, right = lab.ask(settings, data, 0.0), lab.ask(settings, neighbour, 0.0)
        squares = 0.0
        for layers in left.grams:
            distance = float(np.linalg.norm(left.grams[layers] - right.grams[layers]))
            noise = float(spread[worst][layers][0])
            if settings.secure_aggregation:  # as many as must stay, those with the least noise
                needed = secure_threshold(settings, len(SIZES))
                stds = sorted(float(s[layers][0]) for s in spread)[:needed]
                noise = math.sqrt(math.fsum(std**2 for std in stds))
            squares += (distance / noise) ** 2
            assert distance / noise <= (1 + 1e-9) / SIGMA
        assert gaussian_epsilon(math.sqrt(squares)) <= left.epsilon * (1 + 1e-6)
    if settings.privacy_mechanism == "example":
        # and the promise is not empty: an example larger than the clip uses all of it
        left, right = (lab.ask(settings, examples(70, x), 0.0) for x in (HUGE, NULL))
        used = [np.linalg.norm(_mirrored(left.grams[g] - right.grams[g])) for g in left.grams]
        scale = 1.0 if settings.secure_aggregation else 1 / (16 if settings.gram_batches else 70)
        assert used == pytest.approx([CLIP**2 * scale] * len(used), rel=1e-3)


def _mirrored(triangle: np.ndarray) -> np.ndarray:
    dim = int((math.isqrt(8 * triangle.size + 1) - 1) // 2)
    full = np.zeros((dim, dim))
    full[np.triu_indices(dim)] = triangle
    return full + np.triu(full, 1).T


# --- weights and loss under DP-SGD


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("mechanism", SWITCHES["privacy.mechanism"])
def test_steps_of_dp_sgd_hide_as_much_as_the_ledger_says(mechanism, secure, monkeypatch):
    weights = "examples" if mechanism in ("none", "example") else "uniform"
    given = {
        "privacy.mechanism": mechanism,
        "dp-sgd": True,
        "secure-aggregation": secure,
        "gram-weights": weights,
        "optimizer": "sgd",
        "momentum": 0.0,
        "batch-size": 64,  # one step with everybody
        "dp-sgd-clip": 0.3,
        "gram-model": "station",
    }
    lab = Lab(monkeypatch)
    # so large a rate that the rounding of the weights is nothing beside the step
    step = settings_of(**given, lr=1e3)
    still = settings_of(**given, lr=1e-30)
    count = SIZES[0]
    base = examples(count)
    noise = [
        lab.ask(s, base, 1.0, "train").__dict__[what]
        - lab.ask(s, base, 0.0, "train").__dict__[what]
        for s, what in ((step, "model"), (still, "loss"))
    ]
    std = np.abs(noise[0])
    assert std == pytest.approx(np.full_like(std, std.mean()), rel=1e-4)
    for data, neighbour in neighbours("example", count):
        left, right = (lab.ask(step, d, 0.0, "train") for d in (data, neighbour))
        assert np.linalg.norm(left.model - right.model) <= std.mean() / SIGMA * (1 + 1e-6)
        left, right = (lab.ask(still, d, 0.0, "train") for d in (data, neighbour))
        assert abs(left.loss - right.loss) <= abs(noise[1]) / SIGMA * (1 + 1e-9)


def test_the_epsilon_of_a_whole_round_is_not_below_the_truth(monkeypatch):
    """DP-SGD steps, the loss and two Grams, by privacy loss distributions."""
    lab = Lab(monkeypatch)
    given = {"privacy.mechanism": "example", "dp-sgd": True, "local-epochs": 3}
    settings = settings_of(**given)
    seen = lab.ask(settings, examples(40), 0.0, "train")
    true = composed_epsilon([(SIGMA, 8 / 40, 15), (SIGMA, 1.0, 1 + 2)])
    assert true <= seen.epsilon <= 1.25 * true


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
@pytest.mark.parametrize("dp_sgd", [False, True])
def test_a_whole_run_stays_within_its_epsilon(epsilon, dp_sgd, monkeypatch):
    """The noise is measured, the releases are counted by hand."""
    lab = Lab(monkeypatch)
    settings = settings_of(
        **{"privacy.mechanism": "example", "privacy.epsilon": epsilon, "privacy.sigma": 0.0},
        **{"dp-sgd": dp_sgd, "rounds": 2, "station-rounds": 2},
    )
    noised, clean = (lab.ask(settings, examples(40), noise, "train") for noise in (1.0, 0.0))
    layers = next(iter(clean.grams))
    sigma = float(np.abs(noised.grams[layers] - clean.grams[layers])[0]) * 40 / CLIP**2
    releases = [(sigma, 1.0, 2 * 2 + 4 * dp_sgd)] + [(sigma, 8 / 40, 5 * 4)] * dp_sgd
    true = composed_epsilon(releases)
    assert 0.7 * epsilon < true <= epsilon * (1 + 1e-3), "up to the grid of the distributions"


# --- one example must not be able to show itself otherwise


@pytest.mark.parametrize("first", [NULL, HUGE])
@pytest.mark.parametrize("mechanism", ["example", "client", "paper"])
def test_an_example_out_of_range_does_not_make_a_private_client_fail(first, mechanism, monkeypatch):
    lab = Lab(monkeypatch)
    settings = settings_of(**{"privacy.mechanism": mechanism, "dp-sgd": True})
    seen = lab.ask(settings, examples(40, first), 1.0, "train")
    assert np.isfinite(seen.model).all()
    assert np.isfinite(seen.loss)
    assert all(np.isfinite(gram).all() for gram in seen.grams.values())


def test_dp_sgd_adds_its_noise_before_it_rounds():
    """A gradient much smaller than the noise moves the float64 sum and not the float32 one."""
    from hfedatm_core.privacy.dpsgd import make_private

    class Fixed(NoiseSource):
        def normal(self, count):
            return np.full(count, 1.0)

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped, private = make_private(
        model, optimizer, sigma=1e6, clip=1.0, expected_batch_size=1, source=Fixed()
    )
    private.zero_grad()
    (wrapped(torch.tensor([[0.01]])) * 1.0).sum().backward()
    private.step()
    # 1e6 + 0.01 rounds to 1e6 in float32; float32(1e6 + 0.01) is the nearest of the exact sum
    assert model.weight.item() == -float(np.float32(1e6 + 0.01))
    assert private.params[0].summed_grad.dtype == torch.float64


@pytest.mark.parametrize("kind", ["train", "train.prepare"])
def test_a_client_refuses_dp_sgd_with_a_method_that_sends_more(kind):
    settings = settings_of(**{"dp-sgd": True, "client-method": "fediir"})
    reply = ask_client(settings, 0, net(SPEC).state_dict(), kind)
    assert "which DP-SGD does not cover" in reply["failure"]["reason"]


def test_shared_noise_that_the_fixed_point_would_swallow_is_refused(monkeypatch):
    given = {"secure-aggregation": True, "gram-weights": "examples", "privacy.clip": 1e-5}
    settings = settings_of(**{"privacy.mechanism": "example", **given})
    lab = Lab(monkeypatch)
    with pytest.raises(AssertionError, match="fixed point of a secure sum would round away"):
        lab.ask(settings, examples(40), 0.0)
