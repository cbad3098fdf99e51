"""Secure aggregation: exact sums, any allowed dropout, nothing readable on the way."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hfedatm_core.secagg import (
    Aggregator,
    FixedPoint,
    SecureAggregationError,
    SecureClient,
    default_threshold,
    shamir,
)

SESSION = b"run-1/station-2/round-3"


def reload(client: SecureClient) -> SecureClient:
    """Go on in another process, as a deployed client does between messages."""
    return SecureClient.from_bytes(client.to_bytes())


class Round:
    """A station and its clients, with the stages one by one."""

    def __init__(self, ids, size=50, threshold=None, fixed_point=None, seed=0):
        generator = np.random.default_rng(seed)
        self.vectors = {i: generator.normal(scale=3.0, size=size) for i in ids}
        self.fixed_point = fixed_point or FixedPoint()
        self.station = Aggregator(SESSION, size, threshold=threshold, fixed_point=self.fixed_point)
        self.clients = {i: SecureClient(i, SESSION) for i in ids}

    def advertise(self):
        for i, client in self.clients.items():
            self.station.advertised(i, client.advertise())
        return self

    def share(self, ids=None):
        directory = self.station.directory()
        for i in ids if ids is not None else self.clients:
            self.clients[i] = reload(self.clients[i])
            self.station.shared(i, self.clients[i].share(directory))
        return self

    def mask(self, ids=None):
        for i in ids if ids is not None else self.clients:
            self.clients[i] = reload(self.clients[i])
            inbox = self.station.inbox(i)
            vector = self.clients[i].mask(inbox, self.vectors[i], self.fixed_point)
            self.station.masked(i, vector)
        return self

    def reveal(self, ids=None):
        survivors = self.station.survivors()
        for i in ids if ids is not None else survivors:
            self.clients[i] = reload(self.clients[i])
            self.station.revealed(i, self.clients[i].reveal(survivors))
        return self

    def check(self, delivered):
        exact = sum(self.vectors[i] for i in delivered)
        tolerance = len(delivered) * 2.0 ** (-self.fixed_point.fraction - 1)
        assert np.abs(self.station.result() - exact).max() <= tolerance * (1 + 1e-6)


@pytest.mark.parametrize(
    "fixed_point", [FixedPoint(), FixedPoint(bits=32, fraction=16)], ids=["64", "32"]
)
def test_the_sum_is_exact_up_to_rounding(fixed_point):
    ids = [3, 2**63 + 5, 7, 11]  # as large as the node ids of a real network
    Round(ids, fixed_point=fixed_point).advertise().share().mask().reveal().check(ids)


@given(st.data())
@settings(max_examples=40)
def test_any_allowed_pattern_of_dropouts_is_recovered(data):
    count = data.draw(st.integers(3, 7))
    threshold = data.draw(st.integers(count // 2 + 1, count))
    ids = list(range(10, 10 + count))

    def stay(before):
        size = data.draw(st.integers(threshold, len(before)))
        return sorted(data.draw(st.permutations(before))[:size])

    sharing = stay(ids)
    delivering = stay(sharing)
    revealing = stay(delivering)
    run = Round(ids, threshold=threshold, size=9).advertise()
    run.share(sharing).mask(delivering).reveal(revealing).check(delivering)


def test_too_many_dropouts_fail_clearly_in_every_stage():
    ids = list(range(6))
    with pytest.raises(SecureAggregationError, match="only 3 clients shared, the threshold is 4"):
        Round(ids).advertise().share([0, 1, 2]).mask([0])
    with pytest.raises(SecureAggregationError, match="only 3 clients delivered"):
        Round(ids).advertise().share().mask([0, 1, 2]).reveal()
    run = Round(ids).advertise().share().mask().reveal([0, 1, 2])
    with pytest.raises(SecureAggregationError, match="only 3 clients revealed"):
        run.station.result()
    with pytest.raises(SecureAggregationError, match="only 1 clients advertised"):
        Round([1]).advertise().station.directory()


def test_one_masked_vector_looks_uniform():
    run = Round([1, 2, 3], size=20_000).advertise().share()
    run.vectors[1][:] = 0.0  # the plainest of vectors
    masked = run.clients[1].mask(run.station.inbox(1), run.vectors[1])
    assert stats.kstest(masked / 2.0**64, "uniform").pvalue > 1e-6
    for byte in range(8):
        counts = np.bincount((masked >> np.uint64(8 * byte)) & np.uint64(255), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-7


def test_the_sum_of_survivors_stays_masked_without_enough_shares():
    run = Round([1, 2, 3, 4], size=1000).advertise().share().mask()
    blind = run.fixed_point.decode(run.station._total)
    exact = sum(run.vectors.values())
    assert abs(np.corrcoef(blind, exact)[0, 1]) < 0.2
    assert np.abs(blind - exact).min() > 1.0


def test_a_client_reveals_once_and_one_kind_of_share_per_peer():
    run = Round([1, 2, 3, 4]).advertise().share().mask([1, 2, 3])
    state = run.clients[1]
    answer = json.loads(state.reveal([1, 2, 3]))
    assert set(answer["seeds"]) == {"1", "2", "3"}
    assert set(answer["keys"]) == {"4"}
    with pytest.raises(SecureAggregationError, match="client 1 is at stage 'finished'"):
        reload(state).reveal([1, 2, 3, 4])


def test_a_client_does_not_help_to_unmask_too_few():
    run = Round([1, 2, 3, 4]).advertise().share().mask()
    with pytest.raises(SecureAggregationError, match="not revealing"):
        run.clients[1].reveal([1, 2])
    with pytest.raises(SecureAggregationError, match="does not fit"):
        run.clients[1].reveal([2, 3, 4])
    with pytest.raises(SecureAggregationError, match="does not fit"):
        run.clients[1].reveal([1, 2, 3, 9])


def flip(text: str) -> str:
    return ("0" if text[-1] != "0" else "1").join([text[:-1], ""])


def test_an_altered_encrypted_share_is_refused():
    run = Round([1, 2, 3]).advertise().share()
    inbox = json.loads(run.station.inbox(1))
    inbox["sealed"]["2"] = flip(inbox["sealed"]["2"])
    with pytest.raises(SecureAggregationError, match="from client 2 was altered"):
        run.clients[1].mask(json.dumps(inbox).encode(), run.vectors[1])
    # a share meant for somebody else
    with pytest.raises(SecureAggregationError, match="altered or meant for somebody else"):
        other = json.loads(run.station.inbox(3))["sealed"]["2"]
        swapped = {"sealed": {**inbox["sealed"], "2": other}}
        run.clients[1].mask(json.dumps(swapped).encode(), run.vectors[1])
    # the refusal leaves the client where it was
    run.mask().reveal().check([1, 2, 3])


@pytest.mark.parametrize("kind", ["seeds", "keys"])
def test_a_false_share_is_noticed(kind):
    run = Round([1, 2, 3, 4]).advertise().share().mask([1, 2, 3])
    survivors = run.station.survivors()
    for i in survivors:
        message = json.loads(run.clients[i].reveal(survivors))
        if i == 2:
            owner = min(message[kind])
            message[kind][owner] = flip(message[kind][owner])
        run.station.revealed(i, json.dumps(message).encode())
    with pytest.raises(SecureAggregationError, match=r"\[1, 2, 3\] sent a false share"):
        run.station.result()


def test_garbled_and_repeated_messages_name_the_client():
    run = Round([1, 2, 3])
    station, client = run.station, run.clients[1]
    message = client.advertise()
    for garbage in (b"", b"\xff\x00", b"[]", b"{}", message.replace(b'"mask_key"', b'"x"')):
        with pytest.raises(SecureAggregationError, match="advertisement of client 1"):
            station.advertised(1, garbage)
    short = json.loads(message)
    short["mask_key"] = short["mask_key"][2:]
    with pytest.raises(SecureAggregationError, match="client 1.*has 31 bytes, expected 32"):
        station.advertised(1, json.dumps(short).encode())
    station.advertised(1, message)
    with pytest.raises(SecureAggregationError, match="client 1 has advertised twice"):
        station.advertised(1, message)
    for i in (2, 3):
        station.advertised(i, run.clients[i].advertise())

    directory = station.directory()
    with pytest.raises(SecureAggregationError, match="client 4 came after stage 'advertise'"):
        station.advertised(4, message)
    with pytest.raises(SecureAggregationError, match="client 9 did not advertise"):
        station.shared(9, b"{}")
    shares = json.loads(client.share(directory))
    del shares["sealed"]["3"]
    with pytest.raises(SecureAggregationError, match="client 1 are not for exactly the other"):
        station.shared(1, json.dumps(shares).encode())
    with pytest.raises(SecureAggregationError, match="client 1 is at stage 'mask', not 'share'"):
        client.share(directory)

    run = Round([1, 2, 3]).advertise().share()
    vector = run.clients[1].mask(run.station.inbox(1), run.vectors[1])
    with pytest.raises(SecureAggregationError, match=r"client 1 is uint64\[49\], expected uint64"):
        run.station.masked(1, vector[1:])
    with pytest.raises(SecureAggregationError, match="client 1 is float64"):
        run.station.masked(1, run.vectors[1])
    run.station.masked(1, vector)
    with pytest.raises(SecureAggregationError, match="client 1 has delivered its vector twice"):
        run.station.masked(1, vector)
    run.mask([2])
    survivors = run.station.survivors()
    with pytest.raises(SecureAggregationError, match="client 3 came after stage 'mask'"):
        run.station.masked(3, vector)
    with pytest.raises(SecureAggregationError, match="client 3 did not deliver"):
        run.station.revealed(3, b"{}")
    answer = json.loads(run.clients[1].reveal(survivors))
    answer["keys"] = {}
    with pytest.raises(SecureAggregationError, match="reveal of client 1 is not about exactly"):
        run.station.revealed(1, json.dumps(answer).encode())


def test_a_false_directory_is_refused():
    run = Round([1, 2, 3]).advertise()
    directory = json.loads(run.station.directory())

    def refused(change, match):
        altered = json.loads(json.dumps(directory))
        change(altered)
        with pytest.raises(SecureAggregationError, match=match):
            reload(run.clients[1]).share(json.dumps(altered).encode())

    keys = directory["mask_keys"]
    refused(lambda d: d["mask_keys"].update({"1": keys["2"], "2": keys["1"]}), "does not hold")
    refused(lambda d: d["mask_keys"].update({"3": keys["2"]}), "same mask key")
    refused(lambda d: d["mask_keys"].pop("3"), "incomplete")
    refused(lambda d: d.update(threshold=1), "not safe")
    refused(lambda d: d.update(threshold=4), "not safe")
    refused(lambda d: d.update(session=b"other".hex()), "another session")
    refused(lambda d: d["mask_keys"].update({"x": keys["2"]}), "no client")


def test_an_unusable_public_key_names_its_client():
    run = Round([1, 2, 3]).advertise()
    directory = json.loads(run.station.directory())
    directory["share_keys"]["2"] = "00" * 32
    with pytest.raises(SecureAggregationError, match="public key of client 2 is not valid"):
        run.clients[1].share(json.dumps(directory).encode())


def test_fixed_point_refuses_what_might_overflow():
    fixed = FixedPoint(bits=32, fraction=16)
    limit = fixed.limit(4)
    assert limit == 2.0**15 / 4
    largest = np.array([limit - 1.0, -(limit - 1.0)])
    total = sum(fixed.encode(largest, 4) for _ in range(4))
    assert np.array_equal(fixed.decode(total), 4 * largest)
    with pytest.raises(SecureAggregationError, match="an entry of size 8192 does not fit"):
        fixed.encode([limit], 4)
    with pytest.raises(SecureAggregationError, match="NaN"):
        fixed.encode([np.nan], 4)
    with pytest.raises(SecureAggregationError, match="flat vector"):
        fixed.encode([[1.0]], 4)
    for wrong in ({"bits": 16}, {"fraction": 63}, {"fraction": -1}):
        with pytest.raises(ValueError):
            FixedPoint(**wrong)


def test_thresholds_are_safe():
    for count in range(2, 200):
        threshold = default_threshold(count)
        assert 2 <= threshold <= count < 2 * threshold
    with pytest.raises(SecureAggregationError, match="not safe"):
        Round([1, 2, 3, 4], threshold=2).advertise().station.directory()


@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.integers(0, 4), st.randoms())
@settings(max_examples=50)
def test_shamir(secret, threshold, more, random):
    shares = shamir.split(secret, threshold, threshold + more)
    chosen = random.sample(range(1, threshold + more + 1), threshold)
    assert shamir.combine({x: shares[x - 1] for x in chosen}) == secret
    if threshold > 1:
        few = {x: shares[x - 1] for x in chosen[1:]}
        try:
            assert shamir.combine(few) != secret
        except ValueError:
            pass
    with pytest.raises(ValueError, match="malformed"):
        shamir.combine({1: b"short"})


def test_a_state_from_disk_is_checked():
    with pytest.raises(SecureAggregationError, match="saved state"):
        SecureClient.from_bytes(b"{}")
    state = json.loads(SecureClient(1, SESSION).to_bytes())
    state["seed"] = "00"
    with pytest.raises(SecureAggregationError, match="'seed' has 1 bytes"):
        SecureClient.from_bytes(json.dumps(state).encode())


def test_masking_a_lenet_among_twenty_clients_is_fast():
    ids = list(range(20))
    run = Round(ids, size=61_706).advertise().share()
    inbox = run.station.inbox(0)
    start = time.process_time()
    vector = run.clients[0].mask(inbox, run.vectors[0])
    assert time.process_time() - start < 1.0
    run.station.masked(0, vector)
    run.mask(ids[1:16])
    start = time.process_time()
    run.reveal().check(ids[:16])
    assert time.process_time() - start < 3.0
