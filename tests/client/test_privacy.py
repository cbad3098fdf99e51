"""A client's privacy: noise on what it sends, and a ledger and a budget that hold."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from flwr.common.config import flatten_dict
from helpers import ask_client, lines_of, log_lines, run_small, small_settings, tiny_data, tiny_net
from torch import nn

from client_app.methods.fedavg import FedAvg
from client_app.private_training import LOSS_BOUND, private_loss, train_privately
from hfedatm.base.batches import Batches
from hfedatm.base.building import build_method, build_model, example_grams
from hfedatm.base.errors import UserError
from hfedatm.base.memory import NodeMemory
from hfedatm.base.privacy_settings import statement
from hfedatm.base.records import record_to_grams, record_to_state
from hfedatm.base.settings import SettingsError, keys
from hfedatm.contracts import StationRule
from hfedatm.runtime.opening import check
from hfedatm_core import ChannelGraph
from hfedatm_core.privacy.accounting import Ledger
from hfedatm_core.privacy.noise import NoiseSource
from server_app.rules.avg import Avg

EXAMPLE = {"privacy.mechanism": "example", "privacy.epsilon": 4.0}
SEEDED = EXAMPLE | {"privacy.insecure-dp-seed": 3}
CPU = torch.device("cpu")


def start(settings) -> dict[str, torch.Tensor]:
    return build_model(settings, tiny_data().spec, build_method(settings)).state_dict()


def ask(settings, client=0, model=None, **task):
    return ask_client(settings, client, model or start(settings), send_grams=True, **task)


def grams(reply) -> dict[str, torch.Tensor]:
    return {name: gram.dense() for name, gram in record_to_grams(reply["grams"]).items()}


def epsilon(reply) -> float:
    return reply["metrics"]["epsilon"]


def ledger(client=0) -> Ledger:
    path = NodeMemory("run", f"client-{client}").folder / "privacy.json"
    return Ledger.from_dict(json.loads(path.read_text())["ledger"])


# --- settings


def test_flower_reads_every_privacy_key_from_pyproject():
    root = Path(__file__).resolve().parents[2]
    config = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    flat = flatten_dict(config)
    wanted = [key for key in keys() if key.startswith(("privacy.", "dp-sgd", "secure-", "fix-"))]
    assert len(wanted) == 12
    assert [key for key in wanted if flat.get(key) != ""] == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"privacy.mechanism": "example"}, "set privacy.epsilon or privacy.sigma"),
        ({"dp-sgd": True}, "set privacy.epsilon or privacy.sigma"),
        ({"privacy.epsilon": 1.0}, "nothing is noised"),
        ({**EXAMPLE, "privacy.rank": 4}, "privacy.rank"),
        ({"dp-sgd": True, "privacy.sigma": 1.0, "train-fn": "a:b"}, "train-fn"),
        ({**EXAMPLE, "secure-aggregation": True}, "right only for gram-weights = 'examples'"),
        ({"secure-aggregation": True, "clients-per-station": 1}, "at least 2 clients"),
    ],
)
def test_settings_that_protect_less_than_they_say_are_refused(given, message):
    with pytest.raises(SettingsError, match=message):
        small_settings(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**EXAMPLE, "server-rule": "avg"}, "uses no Grams"),
        ({**EXAMPLE, "gram-max-dim": 20}, "layer '4' has 36 inputs"),
        ({"secure-aggregation": True, "gram-max-dim": 20}, "no secure sums"),
        ({"dp-sgd": True, "privacy.sigma": 1, "client-method": "fedprox"}, "'fedprox'"),
        ({"dp-sgd": True, "privacy.sigma": 1, "client-method": "fediir"}, "'fediir'"),
        ({"dp-sgd": True, "privacy.sigma": 1, "server-rule": "mtgc"}, "mtgc"),
        (
            {"dp-sgd": True, "privacy.sigma": 1, "model": "test_privacy:batch_norm_net"},
            r"1 \(BatchNorm2d\): fix-model=true",
        ),
        (
            {"dp-sgd": True, "privacy.sigma": 1, "model": "test_privacy:in_place_net"},
            "Opacus cannot train model",
        ),
        ({"secure-aggregation": True, "server-rule": "fedrc-weights"}, "secure-aggregation"),
        ({"secure-aggregation": True, "server-rule": "test_privacy:Picky"}, "weighs clients"),
    ],
)
def test_a_run_that_cannot_keep_its_promise_ends_before_round_one(given, message):
    with pytest.raises(UserError, match=message):
        check(small_settings(**given))


def batch_norm_net(spec, width: int = 16) -> nn.Module:
    net = tiny_net(spec, width)
    net.insert(1, nn.BatchNorm2d(4))
    return net


class InPlace(nn.Module):
    def __init__(self, spec) -> None:
        super().__init__()
        self.net = tiny_net(spec)
        self.more = nn.Linear(spec.num_classes, spec.num_classes)

    def forward(self, x):
        out = self.net(x)
        out += self.more(out)
        return out


def in_place_net(spec) -> nn.Module:
    return InPlace(spec)


class OneVote(StationRule):
    def weight(self, metrics, shared) -> float:
        return 1.0


@dataclass
class Picky(Avg):
    def at_station(self) -> StationRule:
        return OneVote()


# --- Grams


@pytest.mark.parametrize(
    "given",
    [{"privacy.mechanism": m} for m in ("example", "client")]
    + [{"privacy.mechanism": "paper", "privacy.rank": 4}],
)
def test_the_grams_that_leave_are_noised_as_much_as_was_agreed(given):
    settings = small_settings(**given, **{"privacy.sigma": 2.0, "privacy.clip": 3.0})
    almost_none = small_settings(**given, **{"privacy.sigma": 1e-6, "privacy.clip": 3.0})
    clean, noised = grams(ask(almost_none, run="clean")), grams(ask(settings, run="noised"))
    examples = ask(settings, run="n")["metrics"]["num-examples"]
    std = {"example": 2.0 * 9.0 / examples, "client": 2.0 * 3.0, "paper": 2.0 * 3.0 * 2.0}
    for name, gram in noised.items():
        assert torch.equal(gram, gram.T)
        noise = (gram - clean[name])[torch.triu_indices(*gram.shape).unbind()]
        expected = std[given["privacy.mechanism"]]
        assert float(noise.std()) == pytest.approx(expected, rel=5 / (2 * noise.numel()) ** 0.5)


def test_examples_are_clipped_before_they_are_added():
    settings = small_settings(**{**EXAMPLE, "privacy.clip": 0.5, "privacy.sigma": 1e-6})
    settings = settings.model_copy(update={"privacy_epsilon": 0.0})
    for gram in grams(ask(settings)).values():
        assert float(gram.trace()) <= 0.25 * 1.001


def test_the_noise_repeats_with_an_insecure_seed_only():
    model = start(small_settings())
    for given, same in ((SEEDED, True), (EXAMPLE, False)):
        settings = small_settings(**given)
        one, other = (grams(ask(settings, model=model, run=run)) for run in ("one", "other"))
        assert all(torch.equal(one[name], other[name]) for name in one) is same
    settings = small_settings(**SEEDED)
    second = grams(ask(settings, model=model, run="two", round=2, station_round=1))
    first = grams(ask(settings, model=model, run="three"))
    # one noise in two rounds could be subtracted
    difference = {name: (second[name] - first[name]).abs().max() for name in first}
    assert min(difference.values()) > 0.01


def test_small_grams_are_refused_unless_noised():
    few = {"gram-min-rows": 10_000}
    assert "fewer than gram-min-rows" in ask(small_settings(**few))["failure"]["reason"]
    assert "grams" in ask(small_settings(**few, **EXAMPLE))


def test_measuring_at_the_station_model_is_a_release_too():
    settings = small_settings(**EXAMPLE, **{"gram-model": "station"})
    reply = ask_client(settings, 0, start(settings), "train.measure")
    assert epsilon(reply) > 0
    assert ledger() == Ledger().spend_gaussian(next(iter(ledger().releases))[0], 2)


# --- the ledger and the budget


def test_the_whole_run_spends_the_budget_and_not_more():
    settings = small_settings(**EXAMPLE)
    spent = [epsilon(ask(settings, round=r)) for r in (1, 2)]
    assert 0 < spent[0] < spent[1]
    assert spent[1] == pytest.approx(4.0, rel=1e-6)
    assert spent[1] <= 4.0 * (1 + 1e-9)


def test_a_round_done_again_is_paid_for_again_and_then_refused():
    settings = small_settings(**EXAMPLE)
    once = epsilon(ask(settings))
    again = epsilon(ask(settings))
    assert again > once
    reason = ask(settings, round=2)["failure"]["reason"]
    assert "BudgetExceededError: client 0 has spent epsilon = 4 of 4" in reason
    assert epsilon(ask(settings, client=1)) == pytest.approx(once), "each client has its own"
    assert ledger().epsilon(1e-5) == pytest.approx(again), "what was refused was not booked"


def test_a_refused_client_does_not_train(monkeypatch):
    settings = small_settings(**EXAMPLE)
    for _ in range(2):
        ask(settings)
    monkeypatch.setattr("client_app.client.train_locally", lambda *_: pytest.fail("it trained"))
    assert "BudgetExceededError" in ask(settings)["failure"]["reason"]


def test_with_sigma_given_epsilon_is_reported_and_nothing_refused():
    settings = small_settings(**{"privacy.mechanism": "client", "privacy.sigma": 1.5})
    spent = [epsilon(ask(settings, round=1)) for _ in range(4)]
    exact = [Ledger().spend_gaussian(1.5, 2 * n).epsilon(1e-5) for n in range(1, 5)]
    assert spent == pytest.approx(exact)


def test_nothing_leaves_when_it_could_not_be_booked(monkeypatch):
    def broken(self, account):
        raise OSError("disk full")

    settings = small_settings(**EXAMPLE)
    ask(settings)
    monkeypatch.setattr("client_app.ledger.LedgerFile.write", broken)
    reply = ask(settings)
    assert list(reply) == ["failure"]
    assert "disk full" in reply["failure"]["reason"]


def test_a_ledger_that_cannot_be_read_stops_the_client():
    settings = small_settings(**EXAMPLE)
    ask(settings)
    (NodeMemory("run", "client-0").folder / "privacy.json").write_text("{")
    assert "what this client has spent is unknown" in ask(settings)["failure"]["reason"]


# --- what a run says


def test_every_round_says_what_was_spent(tmp_path):
    with log_lines() as lines:
        folder = run_small(tmp_path, **EXAMPLE)
    spent = [record["privacy"] for record in lines_of(folder)]
    assert [s["budget"] for s in spent] == [4.0, 4.0]
    assert 0 < spent[0]["epsilon"] < spent[1]["epsilon"] <= 4.0 * (1 + 1e-9)
    shown = [line for line in lines if line.startswith("round")]
    assert f"eps {spent[0]['epsilon']:.3g} of 4 |" in shown[0]
    assert "weights that every client sends are NOT private" in "\n".join(lines)


def test_what_was_spent_survives_resume(tmp_path, monkeypatch):
    def stop(record, settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("server_app.after_round.round_line", stop)
        with pytest.raises(KeyboardInterrupt):
            run_small(tmp_path, **EXAMPLE)
    run_small(tmp_path, resume=str(tmp_path / "run"))
    spent = [record["privacy"]["epsilon"] for record in lines_of(tmp_path / "run")]
    assert len(spent) == 2
    assert spent[1] == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nothing is noised"),
        (EXAMPLE, "NOT private"),
        ({"dp-sgd": True, "privacy.sigma": 1}, "Grams are sent WITHOUT noise"),
        ({**EXAMPLE, "dp-sgd": True}, "weights (dp-sgd) and Grams"),
        ({"secure-aggregation": True}, "only the sum"),
        (SEEDED, "PREDICTABLE"),
    ],
)
def test_one_sentence_says_what_is_and_what_is_not_protected(given, said):
    assert said in statement(small_settings(**given))


# --- DP-SGD


def test_dp_sgd_books_its_steps_with_the_grams():
    settings = small_settings(**EXAMPLE, **{"dp-sgd": True})
    model = start(settings)
    reply = ask(settings, model=model)
    trained = record_to_state(reply["model"])
    assert all(bool(torch.isfinite(value).all()) for value in trained.values())
    assert not torch.equal(trained["0.weight"], model["0.weight"])
    examples = reply["metrics"]["num-examples"]
    ((sigma, rate), steps), ((same, full), releases) = sorted(
        ledger().releases.items(), key=lambda item: item[0][1]
    )
    assert (sigma, full) == (same, 1.0)
    assert (rate, steps) == (pytest.approx(32 / examples), -(-examples // 32))
    assert releases == 2 + 1, "two Grams and the loss"


def test_dp_sgd_keeps_to_the_budget_over_a_run(tmp_path):
    folder = run_small(tmp_path, **{**EXAMPLE, "dp-sgd": True, "privacy.epsilon": 8.0})
    records = lines_of(folder)
    assert [record["failures"] for record in records] == [[], []]
    assert records[-1]["privacy"]["epsilon"] == pytest.approx(8.0, rel=1e-4)
    assert records[-1]["privacy"]["epsilon"] <= 8.0 * (1 + 1e-9)


def test_batches_without_examples_are_steps_of_noise():
    torch.manual_seed(0)
    model = tiny_net(tiny_data().spec)
    before = model[0].weight.detach().clone()
    data = Batches(tiny_data().domains["a"], tiny_data().spec, 2, CPU)
    loss = train_privately(
        model, FedAvg(), data, small_settings(), 0.1,
        sigma=1e-3, sample_rate=1e-6, steps=2, source=NoiseSource(),
    )  # fmt: skip
    assert 0 < loss < LOSS_BOUND
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert not torch.equal(model[0].weight, before)
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())


def test_the_reported_loss_is_clipped_and_noised():
    spec, domain = tiny_data().spec, tiny_data().domains["a"]
    model = tiny_net(spec)
    data = Batches(domain, spec, 32, CPU)
    losses = [private_loss(model, data, 2.0, NoiseSource()) for _ in range(60)]
    spread = float(torch.tensor(losses).std())
    assert spread == pytest.approx(2.0 * LOSS_BOUND / len(domain), rel=0.4)
    with torch.no_grad():
        model[-1].weight.mul_(1e4)
    assert private_loss(model, data, 1e-9, NoiseSource()) <= LOSS_BOUND


def test_a_fixed_model_is_the_same_on_every_tier_and_trains(tmp_path):
    given = {
        "model": "test_privacy:batch_norm_net",
        "fix-model": True,
        "dp-sgd": True,
        "privacy.sigma": 0.5,
    }
    settings = small_settings(**given)
    model = build_model(settings, tiny_data().spec, build_method(settings))
    assert isinstance(model[1], nn.GroupNorm)
    graph = ChannelGraph.trace(model, (tiny_data().spec.example(),))
    assert (model[1].num_groups, model[1].num_channels) == (4, 4)
    moved = {member.tensor for group in graph.groups for member in group.members}
    assert "1.weight" in moved, "a norm of one channel per group moves with its channels"
    assert set(example_grams(settings, model, tiny_data().spec)) == {"5", "7"}
    records = lines_of(run_small(tmp_path, **given, rounds=1))
    assert records[0]["failures"] == []
    assert records[0]["privacy"]["budget"] is None
