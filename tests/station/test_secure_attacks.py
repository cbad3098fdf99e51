"""A hostile station asks real clients: each refuses in one line, and nothing has left it."""

import json
import multiprocessing
import os
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from helpers import small_settings
from secure_station import CLIENTS, SECURE, Spied, gather, model_and_layers, silent

from client_app.app import app as client_app
from client_app.secure import Start
from hfedatm.base.records import Task, state_to_record
from hfedatm.base.trust import enrolment
from hfedatm.base.trust.enrolment import Identity
from hfedatm.deploy import certificates
from hfedatm.runtime.in_process import InProcessGrid
from hfedatm_core.secagg import SecureAggregationError, SecureClient
from hfedatm_core.secagg.directory import Directory
from hfedatm_core.secagg.messages import dump
from station_app.hearing import TooFewClients


def begin(client=0, run="run", secure=None, **given):
    """Return the reply of one client to the beginning of a sum."""
    settings = small_settings(**(SECURE | given))
    state, _ = model_and_layers(settings)
    task = Task("train", settings, 1, station=0, station_round=1, client=client, run=run)
    content = RecordDict({"model": state_to_record(state), "task": task.to_record()})
    if secure is not None:
        content["secure"] = ConfigRecord(secure)
    (reply,) = InProcessGrid(client_app, [client]).send_and_receive(
        [Message(content, client, "train")]
    )
    return reply.content


def refusal(content) -> str:
    assert list(content) == ["failure"], "it was answered"
    (line,) = content["failure"]["reason"].splitlines()
    return line


def left(app: Spied, kind: str) -> list[int]:
    """Return the clients that gave an answer in a stage."""
    return [c for k, c, reply in app.seen if k == kind and "failure" not in reply.content]


START = {"session": b"s" * 16, "asked": CLIENTS, "metrics": ["loss"]}


# --- downgrade


@pytest.fixture
def policy(tmp_path, monkeypatch):
    def write(text):
        path = tmp_path / "policy.toml"
        code = '[code]\nallowed = ["helpers:tiny_data", "helpers:tiny_net"]\n'
        path.write_text(code + text)
        monkeypatch.setenv("HFEDATM_POLICY", str(path))

    return write


def test_a_reply_that_its_owner_wants_summed_is_not_given_in_the_clear(policy):
    policy("[secure-sum]\nrequired = true")
    assert "secure-sum.required" in refusal(begin(**{"secure-aggregation": False}))
    assert "asked for a reply in the clear" in refusal(begin())
    assert "keys" in begin(secure=START)


def test_a_client_counts_the_clients_of_the_directory_and_not_what_the_station_says(policy):
    policy("[secure-sum]\nleast-clients = 5")
    assert "5 or more" in refusal(begin(secure={**START, "asked": 4}))
    # five are asked, but one does not come
    app = Spied({("train", 4): silent})
    with pytest.raises(TooFewClients, match="takes part in one of at least 5"):
        gather(app)
    assert left(app, "train.share") == []


def test_a_sum_that_shrinks_below_the_owners_minimum_is_given_up(policy):
    policy("[secure-sum]\nleast-clients = 5")
    app = Spied({("train.mask", 4): silent})
    with pytest.raises(TooFewClients):
        gather(app)
    assert left(app, "train.sign") == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"asked": 1},
        {"asked": 0},
        {"asked": -5},
        {"asked": 10**9},
        {"asked": 5.0},
        {"asked": True},
        {"asked": "5"},
        {"session": b"short"},
        {"session": "text" * 8},
        {"session": b"s" * 1000},
        {"metrics": ["num-clients"]},
        {"metrics": "loss"},
        {"metrics": [1]},
    ],
    ids=str,
)
def test_an_odd_beginning_is_refused(wrong):
    assert refusal(begin(secure={**START, **wrong}))


# --- asking twice


def test_the_same_step_with_another_cohort_is_refused():
    """The difference of two sums that differ in one client is that client's reply."""
    gather()
    app = Spied()
    with pytest.raises(TooFewClients, match="this step was summed before, with another cohort"):
        gather(app, clients=range(CLIENTS - 1))
    assert left(app, "train") == [0, 1, 2, 3]
    assert left(app, "train.share") == []
    assert left(app, "train.mask") == []


def test_the_same_step_with_other_survivors_is_refused():
    gather()
    app = Spied({("train.mask", 4): silent})
    with pytest.raises(TooFewClients):
        gather(app)
    assert left(app, "train.sign") == []
    assert left(app, "train.reveal") == []


def test_the_same_step_with_the_same_clients_gives_the_same_sum_again():
    """As after a crash of the station: there is nothing to be learned from it."""
    _, first, _ = gather()
    _, second, _ = gather()
    assert all(np.allclose(first[name], second[name], atol=1e-6) for name in first)


def test_a_sum_that_died_before_masked_vectors_left_may_be_tried_with_others():
    with pytest.raises(TooFewClients):
        gather(Spied({("train.check", client): silent for client in range(CLIENTS)}))
    strategy, *_ = gather(clients=range(CLIENTS - 1))
    assert strategy.num_clients == CLIENTS - 1


def test_another_step_is_another_sum():
    gather()
    settings = small_settings(**SECURE)
    state, _ = model_and_layers(settings)
    task = Task("train", settings, 2, station=0, station_round=1, client=0)
    content = RecordDict({"model": state_to_record(state), "task": task.to_record()})
    content["secure"] = ConfigRecord(START)
    (reply,) = InProcessGrid(client_app, [0]).send_and_receive([Message(content, 0, "train")])
    assert "keys" in reply.content


def test_a_sum_is_begun_once():
    assert "keys" in begin(secure=START)
    assert "was begun before" in refusal(begin(secure=START))


# --- what the station changes on its way


def replaced(message, **fields):
    secure = json.loads(message.content["secure"]["message"])
    message.content["secure"] = ConfigRecord({"message": json.dumps({**secure, **fields}).encode()})


def test_a_threshold_that_changes_is_refused_before_anything_leaves():
    def lower(kind, client, message):
        if kind == "train.share":
            replaced(message, threshold=4)

    app = Spied(meddle=lower)
    with pytest.raises(TooFewClients, match="agreed threshold is 3"):
        gather(app)
    assert left(app, "train.share") == []


def test_a_cohort_of_one_is_refused():
    def alone(kind, client, message):
        if kind == "train.share":
            directory = Directory.from_bytes(message.content["secure"]["message"])
            own = {str(client): directory.members[client].to_dict()}
            data = dump(session=directory.session, threshold=1, members=own)
            message.content["secure"] = ConfigRecord({"message": data})

    with pytest.raises(TooFewClients, match="threshold 1 of 1 clients is not safe"):
        gather(Spied(meddle=alone))


def test_lists_of_survivors_that_differ_reveal_nothing():
    def differ(kind, client, message):
        if kind == "train.sign" and client < 3:
            replaced(message, survivors=[0, 1, 2, 3])

    app = Spied(meddle=differ)
    with pytest.raises(TooFewClients):
        gather(app)
    assert left(app, "train.reveal") == []


def test_a_reveal_without_the_signatures_of_others_is_refused():
    def drop(kind, client, message):
        if kind == "train.reveal":
            kept = json.loads(message.content["secure"]["message"])["signatures"]
            replaced(message, signatures={c: s for c, s in kept.items() if int(c) < 2})

    app = Spied(meddle=drop)
    with pytest.raises(TooFewClients, match="threshold is 3"):
        gather(app)
    assert left(app, "train.reveal") == []
    reasons = [r.content["failure"]["reason"] for k, _, r in app.seen if k == "train.reveal"]
    assert all("only 2 clients signed the list" in reason for reason in reasons)


# --- enrolled clients


class Enrolled(Spied):
    """Clients and a station that have certificates; ``as_`` says under whose name each speaks."""

    def __init__(self, identities, as_=None, **how):
        super().__init__(**how)
        self.identities, self.as_ = identities, as_ or {}

    def answer(self, message, context, client):
        name = self.as_.get(client, f"station-1-client-{client + 1}")
        with self.identities.being(name):
            return super().answer(message, context, client)


@pytest.fixture
def identities(tmp_path, monkeypatch):
    """Make certificates, and let this process be whoever is at work."""
    folder = tmp_path / "secrets"
    certificates.make_authority(folder)
    other = tmp_path / "others"
    certificates.make_authority(other)
    for authority, links in (
        (folder, ("server", "station-1", "station-2")),
        (other, ("station-1",)),
    ):
        for link in links:
            certificates.make_task_key(authority / link)
    certificates.enrol(folder, folder / "station-1", "station-1", "server", 0)
    for place in range(CLIENTS + 1):
        name = f"station-1-client-{place + 1}"
        certificates.enrol(folder, folder / name, name, "station-1", place)
    certificates.enrol(folder, folder / "station-2-client-1", "station-2-client-1", "station-2", 0)
    certificates.enrol(other, other / "invented", "invented", "station-1", 9)

    class Identities:
        def __init__(self):
            self.now = threading.local()
            self.known = {}
            for place in [*folder.iterdir(), other / "invented"]:
                if (place / "node.pem").exists():
                    with monkeypatch.context() as patch:
                        patch.setenv("HFEDATM_SECRETS", str(place))
                        ca = place.parent / "ca.pem"
                        patch.setattr(enrolment, "_own_authority", ca.read_bytes)
                        self.known[place.name] = load(Identity)

        @contextmanager
        def being(self, name):
            before, self.now.name = getattr(self.now, "name", "station-1"), name
            try:
                yield
            finally:
                self.now.name = before

        def current(self):
            return self.known[getattr(self.now, "name", "station-1")]

    load = Identity.load.__func__
    found = Identities()
    monkeypatch.setattr(Identity, "load", lambda: found.current())
    monkeypatch.setattr(enrolment, "_own_authority", (folder / "ca.pem").read_bytes)
    # tasks are signed in a deployment, which is not what is tried here
    monkeypatch.setattr("hfedatm.base.trust.origin.Verifier.load", lambda: None)
    return found


def test_enrolled_clients_sum_as_others_do(identities):
    strategy, *_ = gather(Enrolled(identities))
    assert (strategy.num_clients, strategy.failures) == (CLIENTS, [])


@pytest.mark.parametrize("stranger", ["invented", "station-1", "station-2-client-1"])
def test_who_is_not_enrolled_below_this_station_is_left_out(identities, stranger):
    """One of another authority, the station itself, and a client of another station."""
    strategy, *_ = gather(Enrolled(identities, as_={2: stranger}))
    (failure,) = strategy.failures
    assert failure.node == "client 2"
    assert "cannot prove that it is enrolled" in failure.reason
    assert strategy.num_clients == CLIENTS - 1


def test_one_client_in_two_places_is_left_out_once(identities):
    strategy, *_ = gather(Enrolled(identities, as_={2: "station-1-client-2"}))
    assert [f.node for f in strategy.failures] == ["client 2"]


@pytest.mark.parametrize("stranger", ["invented", "station-1", "station-2-client-1"])
def test_a_station_cannot_count_clients_that_do_not_exist(identities, stranger, monkeypatch):
    """It invents clients to have the real one's noise divided among more, or to surround it."""
    monkeypatch.setattr("station_app.secure.verify_members", lambda: None)
    app = Enrolled(identities, as_={c: stranger for c in (2, 3, 4)})
    with pytest.raises(TooFewClients):
        gather(app)
    real = {
        c: r.content["failure"]["reason"] for k, c, r in app.seen if k == "train.share" and c < 2
    }
    assert len(real) == 2
    assert all("cannot prove that it is enrolled" in reason for reason in real.values())
    assert left(app, "train.mask") == []


def test_four_hundred_invented_clients_do_not_lower_the_noise(identities):
    """What a client's noise counts on must be there, each with a certificate, or nothing leaves."""

    def exaggerate(kind, client, message):
        if kind == "train":
            start = {**message.content["secure"], "asked": CLIENTS + 400}
            message.content["secure"] = ConfigRecord(start)

    given = {"privacy.mechanism": "example", "privacy.sigma": 2.0, "gram-weights": "examples"}
    app = Enrolled(identities, meddle=exaggerate)
    with pytest.raises(TooFewClients, match="agreed threshold is 243"):
        gather(app, **given)
    assert left(app, "train.share") == []


def test_an_enrolled_node_is_one_client_whatever_a_task_calls_it(identities):
    """Under another number it would have another memory, and could be asked for a step again."""
    gather(Enrolled(identities))
    names = {c: f"station-1-client-{c - 9}" for c in range(10, 10 + CLIENTS - 1)}
    app = Enrolled(identities, as_=names)
    with pytest.raises(TooFewClients, match="this step was summed before, with another cohort"):
        gather(app, clients=range(10, 10 + CLIENTS - 1), **{"clients-per-station": 20})
    assert left(app, "train.mask") == []


# --- two messages at once, in two processes


def answer_once(kind, content, start, results):
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    context = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={})
    message = Message(content, 0, kind)
    start.wait()
    results.put("failure" not in client_app(message, context).content)


@pytest.mark.parametrize("stage", ["share", "check", "mask", "sign", "reveal"])
def test_of_two_processes_that_are_asked_at_once_one_answers(stage):
    kind = f"train.{stage}"
    asked = []

    class Held(Spied):
        """Client 0 is not asked in this stage: its message is kept."""

        def answer(self, message, context, client):
            if (message.metadata.message_type, client) == (kind, 0):
                asked.append(message.content)
                return silent(message, None)
            return super().answer(message, context, client)

    gather(Held())
    (content,) = asked
    fork = multiprocessing.get_context("fork")
    start, results = fork.Barrier(4), fork.Queue()
    processes = [
        fork.Process(target=answer_once, args=(kind, content, start, results)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    answered = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(answered) == 1


def test_the_state_on_disk_is_for_its_owner_alone():
    gather()
    folder = os.environ["HFEDATM_STATE"] + "/run/client-0/secure"
    assert os.stat(folder).st_mode & 0o077 == 0
    kept = SecureClient.from_bytes(open(f"{folder}/state", "rb").read())
    assert kept.stage == "finished"
    assert not os.path.exists(f"{folder}/vector.npy"), "the reply itself is gone"


def test_a_start_is_read_totally():
    assert Start.of(RecordDict()) is None
    with pytest.raises(SecureAggregationError):
        Start.of(RecordDict({"secure": ConfigRecord()}))
