"""A client that lies in a secure sum costs itself its place, and the others nothing."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_round import Badge, Round

from hfedatm_core.secagg import SecureAggregationError, SecureClient, shamir
from hfedatm_core.secagg.complaints import blame

IDS = [1, 2, 3, 4, 5]


def flip(text: str) -> str:
    return text[:-1] + ("0" if text[-1] != "0" else "1")


def changed(message: bytes, change) -> bytes:
    fields = json.loads(message)
    change(fields)
    return json.dumps(fields).encode()


class False_(SecureClient):
    """A client that deals shares of other numbers than it is bound to."""

    victims: tuple[int, ...] = ()

    def share(self, directory, verify=None):
        split = shamir.split

        def deal(secret, threshold, points):
            shares, commitments = split(secret, threshold, points)
            order = sorted(IDS)
            for victim in self.victims:
                shares[order.index(victim)] = shamir.new_secret()
            return shares, commitments

        shamir.split = deal
        try:
            return super().share(directory, verify)
        finally:
            shamir.split = split


def dealt_by(liar, victims) -> Round:
    run = Round(IDS, threshold=3)
    run.clients[liar] = False_(liar, run.station.session, step=run.station.step)
    run.clients[liar].victims = victims
    run.advertise()
    directory = run.station.directory()
    for i, client in run.clients.items():
        run.station.shared(i, client.share(directory))
    return run.check()


@pytest.mark.parametrize("victims", [(1, 2, 4, 5), (1, 2), (4, 5)])
def test_who_deals_false_shares_to_several_is_left_out_before_anybody_masks(victims):
    run = dealt_by(3, victims)
    assert run.station.participants() == [1, 2, 4, 5]
    assert run.station.refused == {3: f"clients {list(victims)} find its shares false"}
    run.mask().reveal().check_sum([1, 2, 4, 5])


def test_who_deals_one_false_share_costs_one_client():
    run = dealt_by(3, (4,))
    assert len(run.station.participants()) == 4
    run.mask().reveal().check_sum(run.station.survivors())


def test_who_deals_false_shares_and_then_leaves_costs_nothing():
    """Nobody had added a mask for it, so nobody has to take one off."""
    run = dealt_by(3, (1, 2, 4, 5))
    run.mask().reveal([1, 2, 4]).check_sum([1, 2, 4, 5])


@pytest.mark.parametrize("accused", [[1, 2, 4, 5], [1, 2], [5]])
def test_false_complaints_leave_out_who_makes_them(accused):
    run = Round(IDS, threshold=3).advertise()
    directory = run.station.directory()
    for i, client in run.clients.items():
        run.station.shared(i, client.share(directory))
    for i, client in run.clients.items():
        answer = client.check(run.station.inbox(i))
        run.station.checked(i, json.dumps({"false": accused}).encode() if i == 3 else answer)
    assert run.station.participants() == [1, 2, 4, 5]
    assert "it finds the shares" in run.station.refused[3]
    run.mask().reveal().check_sum([1, 2, 4, 5])


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_blame_leaves_nobody_who_is_complained_about_and_costs_one_per_liar(data):
    clients = list(range(data.draw(st.integers(3, 9))))
    liars = data.draw(st.sets(st.sampled_from(clients), max_size=2))
    complaints = {c: [] for c in clients}
    for by in clients:
        for of in clients:
            if by != of and (by in liars or of in liars) and data.draw(st.booleans()):
                complaints[by].append(of)
    out = blame(complaints)
    left = [c for c in clients if c not in out]
    assert not any(of in left for by in left for of in complaints[by])
    if len(liars) == 1:
        assert len(out) <= 1
    if not liars:
        assert out == {}


# --- the end


@pytest.mark.parametrize("kind", ["seeds", "keys"])
@pytest.mark.parametrize("liar", [1, 3])
def test_a_false_share_is_found_and_left_out(kind, liar):
    run = Round(IDS, threshold=3).advertise().share().mask([1, 2, 3, 4]).sign()
    signatures = run.station.signatures()
    for i in (1, 2, 3, 4):
        message = run.clients[i].reveal(signatures)
        if i == liar:
            owner = min(json.loads(message)[kind])
            message = changed(message, lambda m, o=owner: m[kind].update({o: flip(m[kind][o])}))
        run.station.revealed(i, message)
    run.check_sum([1, 2, 3, 4])
    assert list(run.station.refused) == [liar]
    assert "returned a false share" in run.station.refused[liar]


def test_with_too_few_true_shares_there_is_no_sum_and_the_liar_is_named():
    run = Round([1, 2, 3], threshold=3).advertise().share().mask().sign()
    signatures = run.station.signatures()
    for i in (1, 2, 3):
        message = run.clients[i].reveal(signatures)
        if i == 2:
            message = changed(message, lambda m: m["seeds"].update({"1": flip(m["seeds"]["1"])}))
        run.station.revealed(i, message)
    with pytest.raises(SecureAggregationError, match="only 2 clients revealed sound shares"):
        run.station.result()
    assert run.station.refused == {2: "it returned a false share of client 1"}


# --- odd messages, in every stage


def mutations(message: bytes):
    """Yield messages of other types, sizes and contents, and the empty ones."""
    yield from (b"", b"\xff\x00", b"[]", b"{}", b"null", b"1e400", b"[" * 100_000, "text", None, 7)
    fields = json.loads(message)
    for name, value in fields.items():
        for odd in (None, 7, -1, 1e308, "zz", "00", [], {}, [[]], "00" * 100_000, {"x": "00"}):
            if odd != value:
                yield json.dumps({**fields, name: odd}).encode()
        yield json.dumps({k: v for k, v in fields.items() if k != name}).encode()
        if isinstance(value, dict) and value:
            key = min(value)
            for odd in (None, 7, "zz", "", "00", flip(value[key]) + "00", {"a": 1}):
                yield json.dumps({**fields, name: {**value, key: odd}}).encode()
            for odd in ("-1", "x", "0" * 30, str(2**70), "0" + key):
                yield json.dumps({**fields, name: {**value, odd: value[key]}}).encode()
        if isinstance(value, list):
            for odd in ([-1], ["1"], [2**70], [1.0], [True], [9], [1, 1]):
                yield json.dumps({**fields, name: odd}).encode()


def refuse(take, client, message, honest):
    """Demand that a message is refused as that client's, and the honest one taken after it."""
    if isinstance(message, bytes) and message == honest:
        return
    with pytest.raises(SecureAggregationError, match=f"client {client}"):
        take(client, message)


def test_odd_messages_are_refused_by_name_and_leave_the_sum_as_it_is():
    badges = {i: Badge(f"client-{i}") for i in IDS}
    run = Round(IDS, threshold=3, badges=badges)
    tried = 0

    def stage(take, honest):
        nonlocal tried
        for message in mutations(honest):
            refuse(take, 3, message, honest)
            tried += 1
        take(3, honest)

    for i, client in run.clients.items():
        message = client.advertise(badges[i])
        stage(run.station.advertised, message) if i == 3 else run.station.advertised(i, message)
    directory = run.station.directory()
    for i, client in run.clients.items():
        message = client.share(directory, run.verify)
        stage(run.station.shared, message) if i == 3 else run.station.shared(i, message)
    for i, client in run.clients.items():
        message = client.check(run.station.inbox(i))
        stage(run.station.checked, message) if i == 3 else run.station.checked(i, message)
    run.mask([1, 2, 4])
    vector = run.clients[3].mask(run.station.participants(), run.vectors[3])
    for odd in (
        vector[1:],
        vector.astype(np.float64),
        vector.astype(">u8"),
        vector[None],
        vector * 1.0,
    ):
        refuse(run.station.masked, 3, odd, None)
        tried += 1
    run.station.masked(3, vector)
    run.sign([1, 2, 4])
    stage(run.station.signed, run.clients[3].sign(run.station.survivors()))
    signatures = run.station.signatures()
    for i in (1, 2, 4):
        run.station.revealed(i, run.clients[i].reveal(signatures))
    stage(run.station.revealed, run.clients[3].reveal(signatures))
    run.check_sum([1, 2, 3, 4])
    assert tried > 150


def test_garbled_and_repeated_messages_name_the_client():
    run = Round([1, 2, 3])
    station, client = run.station, run.clients[1]
    message = client.advertise()
    station.advertised(1, message)
    with pytest.raises(SecureAggregationError, match="client 1 has advertised twice"):
        station.advertised(1, message)
    with pytest.raises(SecureAggregationError, match="client 2 advertises the share_key"):
        station.advertised(2, message)
    for i in (2, 3):
        station.advertised(i, run.clients[i].advertise())
    directory = station.directory()
    with pytest.raises(SecureAggregationError, match="client 4 came after stage 'advertise'"):
        station.advertised(4, message)
    with pytest.raises(SecureAggregationError, match="client 9 did not advertise"):
        station.shared(9, b"{}")
    shares = client.share(directory)
    with pytest.raises(SecureAggregationError, match="client 1 are not for exactly the other"):
        station.shared(1, changed(shares, lambda m: m["sealed"].pop("3")))

    run = Round([1, 2, 3], threshold=2).advertise().share().mask([1, 2])
    vector = np.zeros(50, dtype=np.uint64)
    with pytest.raises(SecureAggregationError, match="client 1 has delivered its vector twice"):
        run.station.masked(1, vector)
    run.sign()
    with pytest.raises(SecureAggregationError, match="client 3 came after stage 'mask'"):
        run.station.masked(3, vector)
    with pytest.raises(SecureAggregationError, match="client 3 did not deliver"):
        run.station.revealed(3, b"{}")


@pytest.mark.parametrize("kind", ["share_key", "mask_key"])
def test_keys_nobody_can_use_are_refused_before_others_see_them(kind):
    run = Round([1, 2, 3])
    for zero in ("00" * 32, "01" + "00" * 31):
        honest = SecureClient(1, b"session").advertise()
        message = changed(honest, lambda m, z=zero: m.update({kind: z}))
        with pytest.raises(SecureAggregationError, match="key of client 1"):
            run.station.advertised(1, message)


def test_who_proves_nothing_is_left_out_before_others_would_refuse_the_sum():
    badges = {i: Badge(f"client-{i}") for i in IDS} | {3: Badge("client-3", operator=b"own")}
    run = Round(IDS, threshold=3, badges=badges)
    for i, client in run.clients.items():
        message = client.advertise(badges[i])
        if i == 3:
            with pytest.raises(SecureAggregationError, match="client 3 cannot prove"):
                run.station.advertised(i, message)
        else:
            run.station.advertised(i, message)
    rest = [1, 2, 4, 5]
    run.share(rest).mask().reveal().check_sum(rest)


# --- all of it at once


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_one_liar_anywhere_and_dropouts_anywhere_leave_a_right_sum(data):
    """Whatever one client does, the others' sum is the plain sum as long as enough stay."""
    count, threshold = 6, 4
    ids = list(range(count))
    liar, lie = data.draw(st.sampled_from(ids)), data.draw(st.sampled_from(LIES))
    gone = data.draw(st.sampled_from([c for c in ids if c != liar]))
    leaves = data.draw(st.sampled_from(["share", "check", "mask", "sign", "reveal", "never"]))
    run = Round(ids, threshold=threshold, size=7)
    station, present = run.station, list(ids)

    def stage(name, take, message):
        for c in list(present):
            if c == gone and name == leaves:
                present.remove(c)
                continue
            said = message(c)
            try:
                if c == liar and lie == name:
                    take(c, b"{}" if isinstance(said, bytes) else said[1:])
                else:
                    take(c, said)
            except SecureAggregationError:
                present.remove(c)

    stage("advertise", station.advertised, lambda c: run.clients[c].advertise())
    directory = station.directory()

    def share(c):
        message = run.clients[c].share(directory)
        if c == liar and lie == "boxes":
            boxes = {p: flip(b) for p, b in json.loads(message)["sealed"].items()}
            message = changed(message, lambda m: m.update(sealed=boxes))
        return message

    stage("share", station.shared, share)
    accuse = json.dumps({"false": [c for c in present if c != liar]}).encode()
    stage(
        "check",
        station.checked,
        lambda c: (
            accuse
            if c == liar and lie == "accuse" and run.clients[c].check(station.inbox(c))
            else run.clients[c].check(station.inbox(c))
        ),
    )
    chosen = station.participants()
    present[:] = [c for c in present if c in chosen]
    stage("mask", station.masked, lambda c: run.clients[c].mask(chosen, run.vectors[c]))
    survivors = station.survivors()
    stage("sign", station.signed, lambda c: run.clients[c].sign(survivors))
    signatures = station.signatures()

    def reveal(c):
        message = run.clients[c].reveal(signatures)
        if c == liar and lie == "shares":
            fields = json.loads(message)
            fields["seeds"] = {p: flip(s) for p, s in fields["seeds"].items()}
            message = json.dumps(fields).encode()
        return message

    stage("reveal", station.revealed, reveal)
    assert set(survivors) >= set(ids) - {liar, gone}
    run.check_sum(survivors)


LIES = ["advertise", "share", "boxes", "check", "accuse", "mask", "sign", "reveal", "shares"]
