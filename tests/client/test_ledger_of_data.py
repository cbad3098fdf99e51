"""On a deployed node the account belongs to the data: no new name gets a full budget again."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict
from helpers import small_settings, tiny_data, tiny_net
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from client_app.app import app as client_app
from client_app.data import data_identity
from client_app.ledger import Account, DataLedgerFile, compact
from hfedatm.base.errors import UserError
from hfedatm.base.records import Task, state_to_record
from hfedatm.base.trust.policy import Policy
from hfedatm_core.privacy.accounting import Ledger

CODE = {"allowed": ["helpers:tiny_data", "helpers:tiny_net"]}
EXAMPLE = {"privacy.mechanism": "example", "privacy.epsilon": 4.0}
DELTA = 1e-5


def ask(settings, folder, **task):
    fields = {"round": 1, "station_round": 1, "client": 0, "send_grams": True, "run": "first"}
    record = Task("train", settings, **(fields | task)).to_record()
    model = tiny_net(tiny_data().spec).state_dict()
    content = RecordDict({"task": record, "model": state_to_record(model)})
    context = Context(0, 1, {"data-dir": str(folder)}, RecordDict(), {})
    return client_app(Message(content, 1, "train"), context).content


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "data"
    made.mkdir()
    return made


def accounts() -> list[dict]:
    root = Path(os.environ["HFEDATM_STATE"]) / ".accounts"
    return [json.loads(path.read_text()) for path in root.glob("*.json")]


def total() -> float:
    (account,) = accounts()
    return Ledger.from_dict(account["total"]).epsilon(DELTA)


def limited(policy, most, **more):
    privacy = {"least-mechanism": "example", "total-epsilon": most} | more
    return policy(code=CODE, privacy=privacy)


# --- a new name is not a new budget

NAMES = [
    {"run": "second"},  # a new run, or one that was renamed
    {"client": 1},
    {"client": 7, "run": "again"},
    {"round": 1, "station_round": 2},
]


@pytest.mark.parametrize("other", NAMES)
def test_another_run_or_another_number_adds_to_the_same_account(policy, folder, other):
    limited(policy, 8.0)
    settings = small_settings(**EXAMPLE)
    ask(settings, folder)
    once = total()
    assert "grams" in ask(settings, folder, **other)
    twice = Ledger.from_dict(accounts()[0]["total"])
    ((sigma, _), releases) = next(iter(twice.releases.items()))
    assert releases == 4 and once < total() == pytest.approx(
        Ledger().spend_gaussian(sigma, 4).epsilon(DELTA)
    )


def test_runs_under_ever_new_names_end_at_the_owners_limit(policy, folder):
    limited(policy, 5.0)
    settings = small_settings(**EXAMPLE)
    replies = [ask(settings, folder, run=f"run-{n}", client=n % 4) for n in range(8)]
    answered = [reply for reply in replies if "grams" in reply]
    refused = [reply["failure"]["reason"] for reply in replies if "failure" in reply]
    assert 1 < len(answered) < 8 and len(answered) + len(refused) == 8
    assert total() <= 5.0
    assert all("allows at most 5 (policy: privacy.total-epsilon)" in line for line in refused)
    assert all("\n" not in line for line in refused)


def test_a_resumed_run_goes_on_where_its_account_is(policy, folder):
    """Its own budget holds, too: done again, a round is paid for again."""
    limited(policy, 100.0)
    settings = small_settings(**EXAMPLE)
    spent = [ask(settings, folder)["metrics"]["epsilon"] for _ in range(2)]
    assert spent[0] < spent[1] <= 4.0 * (1 + 1e-9)
    assert "BudgetExceededError" in ask(settings, folder)["failure"]["reason"]
    assert total() == pytest.approx(spent[1])


def test_what_was_refused_was_neither_done_nor_booked(policy, folder, monkeypatch):
    limited(policy, 5.0)
    settings = small_settings(**EXAMPLE)
    for n in range(8):
        ask(settings, folder, run=f"run-{n}")
    before = accounts()
    monkeypatch.setattr("client_app.client.train_locally", lambda *_: pytest.fail("it trained"))
    assert "total-epsilon" in ask(settings, folder, run="last")["failure"]["reason"]
    assert accounts() == before


def test_the_limit_is_asked_again_before_the_reply_leaves(policy, folder, monkeypatch):
    """Meanwhile another run may have spent what there was."""
    from client_app import client

    limited(policy, 4.0)
    settings = small_settings(**EXAMPLE)
    trained = client.train_locally

    def meanwhile(*args):
        monkeypatch.setattr("client_app.client.train_locally", trained)
        for n in range(3):
            ask(settings, folder, run=f"other-{n}")
        return trained(*args)

    monkeypatch.setattr("client_app.client.train_locally", meanwhile)
    assert "total-epsilon" in ask(settings, folder)["failure"]["reason"]
    assert total() <= 4.0 * (1 + 1e-9)


def test_a_run_that_names_no_epsilon_has_the_owners(policy, folder):
    limited(policy, 1000.0, **{"run-epsilon": 3.0})
    settings = small_settings(**{"privacy.mechanism": "example", "privacy.sigma": 2.0})
    replies = [ask(settings, folder) for _ in range(8)]
    assert "grams" in replies[0]
    assert "of 3 at delta" in replies[-1]["failure"]["reason"]


def test_a_weak_noise_that_follows_from_the_settings_is_refused(policy, folder):
    policy(code=CODE, privacy={"least-sigma": 50.0})
    assert "least-sigma" in ask(small_settings(**EXAMPLE), folder)["failure"]["reason"]


def test_a_client_hidden_as_a_whole_counts_by_what_one_example_can_change(policy, folder):
    policy(code=CODE, privacy={"least-mechanism": "client", "total-epsilon": 100.0})
    settings = small_settings(**{"privacy.mechanism": "client", "privacy.sigma": 3.0})
    reported = ask(settings, folder)["metrics"]["epsilon"]
    assert reported == pytest.approx(Ledger().spend_gaussian(3.0, 2).epsilon(DELTA))
    assert total() == pytest.approx(Ledger().spend_gaussian(3.0 / 2**0.5, 2).epsilon(DELTA))


# --- which data


def test_one_folder_is_one_account_however_it_is_written(policy, tmp_path, folder):
    limited(policy, 100.0)
    link = tmp_path / "link"
    link.symlink_to(folder)
    settings = small_settings(**EXAMPLE)
    for place in (folder, link, tmp_path / "x" / ".." / "data"):
        assert "grams" in ask(settings, place, run=place.name)
    assert len(accounts()) == 1


def test_other_data_have_another_account(policy, tmp_path, folder):
    limited(policy, 100.0)
    for place in (folder, tmp_path / "other"):
        ask(small_settings(**EXAMPLE), place)
    assert len(accounts()) == 2


def test_an_embedded_data_set_has_one_name(policy):
    policy()
    spelled = [small_settings(dataset=name) for name in ("digits", "DIGITS", "Digits")]
    assert len({data_identity(settings, {}, Policy.current()) for settings in spelled}) == 1


# --- the file


def test_an_account_that_cannot_be_read_stops_the_node_and_is_kept(policy, folder):
    limited(policy, 8.0)
    settings = small_settings(**EXAMPLE)
    ask(settings, folder)
    (path,) = (Path(os.environ["HFEDATM_STATE"]) / ".accounts").glob("*.json")
    path.write_text("{")
    reply = ask(settings, folder, run="second")
    assert "what this node's data has spent is unknown" in reply["failure"]["reason"]
    assert path.read_text() == "{"


def test_the_account_of_other_data_is_not_taken(tmp_path):
    one, other = (DataLedgerFile(tmp_path, name, "run") for name in ("one", "other"))
    one.lock().acquire().lock.release()
    one.write(Account())
    (path,) = (tmp_path / ".accounts").glob("*.json")
    path.rename(other._path)
    with pytest.raises(UserError, match="account of other data"):
        other.read()


def spend(root, run):
    for _ in range(5):
        file = DataLedgerFile(root, "data", run)
        with file.lock():
            account = file.read()
            account.ledger.spend_gaussian(2.0)
            account.total.spend_gaussian(2.0)
            file.write(account)


def test_processes_that_spend_at_once_lose_nothing(tmp_path):
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=spend, args=(tmp_path, f"run-{n}")) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    account = DataLedgerFile(tmp_path, "data", "run-0").read()
    assert account.total.releases == {(2.0, 1.0): 20}
    assert account.ledger.releases == {(2.0, 1.0): 5}


def test_an_account_stays_small_whatever_is_asked(tmp_path):
    for number in range(30):
        file = DataLedgerFile(tmp_path, "data", f"run-{number}")
        with file.lock(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("client_app.ledger.MOST_RUNS", 10)
            account = file.read()
            account.total.spend_gaussian(2.0)
            file.write(account)
    state = json.loads(file._path.read_text())
    assert list(state["runs"]) == [f"run-{number}" for number in range(20, 30)]
    assert file.read().total.releases == {(2.0, 1.0): 30}, "nothing is forgotten in the total"


SIGMAS = st.floats(0.5, 20)
RATES = st.one_of(st.just(1.0), st.floats(0.01, 0.9))


@examples(max_examples=15, deadline=None)
@given(st.dictionaries(st.tuples(SIGMAS, RATES), st.integers(1, 50), min_size=1, max_size=12))
def test_what_is_kept_together_never_counts_less(releases):
    exact = Ledger(releases)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("client_app.ledger.MOST_KINDS", 4)
        kept = compact(exact)
    assert len(kept.releases) <= 4
    assert kept.epsilon(DELTA) >= exact.epsilon(DELTA) * (1 - 1e-9)


@examples(max_examples=50, deadline=None)
@given(st.dictionaries(st.tuples(SIGMAS, st.just(1.0)), st.integers(1, 50), min_size=5))
def test_releases_of_all_examples_are_kept_together_exactly(releases):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("client_app.ledger.MOST_KINDS", 4)
        kept = compact(Ledger(releases))
    assert len(kept.releases) == 1
    assert kept.epsilon(DELTA) == pytest.approx(Ledger(releases).epsilon(DELTA), rel=1e-6)


def test_in_one_process_every_client_of_every_run_has_its_own(monkeypatch, folder):
    monkeypatch.delenv("HFEDATM_POLICY", raising=False)
    settings = small_settings(**EXAMPLE)
    spent = [
        ask(settings, folder, **other)["metrics"]["epsilon"]
        for other in ({"run": "a", "client": 0}, {"run": "a", "client": 1}, {"run": "b"})
    ]
    assert len(set(spent)) == 1
    assert accounts() == []


# --- DP-SGD under a hostile server


def test_a_method_that_mixes_examples_is_not_trained_as_if_it_did_not(policy, folder):
    policy(code=CODE, privacy={"dp-sgd": True})
    given = {"dp-sgd": True, "privacy.sigma": 1.0, "client-method": "fedprox"}
    reply = ask(small_settings(**given), folder, send_grams=False)
    assert "mixes examples" in reply["failure"]["reason"]
