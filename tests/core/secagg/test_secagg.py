"""Secure aggregation: exact sums, any allowed dropout, nothing readable on the way."""

import hashlib
import json
import time

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from secure_round import Round, reload

from hfedatm_core.secagg import (
    FixedPoint,
    SecureAggregationError,
    SecureClient,
    default_threshold,
    edwards,
    shamir,
)


@pytest.mark.parametrize(
    "fixed_point", [FixedPoint(), FixedPoint(bits=32, fraction=16)], ids=["64", "32"]
)
def test_the_sum_is_exact_up_to_rounding(fixed_point):
    ids = [3, 2**63 + 5, 7, 11]  # as large as the node ids of a real network
    Round(ids, fixed_point=fixed_point).advertise().share().mask().reveal().check_sum(ids)


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_any_allowed_pattern_of_dropouts_is_recovered(data):
    count = data.draw(st.integers(3, 7))
    threshold = data.draw(st.integers(count // 2 + 1, count))
    ids = list(range(10, 10 + count))

    def stay(before):
        size = data.draw(st.integers(threshold, len(before)))
        return sorted(data.draw(st.permutations(before))[:size])

    sharing = stay(ids)
    delivering = stay(sharing)
    signing = stay(delivering)
    run = Round(ids, threshold=threshold, size=9).advertise()
    run.share(sharing).mask(delivering).sign(signing)
    run.reveal(stay(signing)).check_sum(delivering)


def test_too_many_dropouts_fail_clearly_in_every_stage():
    ids = list(range(6))
    with pytest.raises(SecureAggregationError, match="only 3 clients shared, the threshold is 4"):
        Round(ids).advertise().share([0, 1, 2])
    with pytest.raises(SecureAggregationError, match="only 3 clients delivered"):
        Round(ids).advertise().share().mask([0, 1, 2]).reveal()
    with pytest.raises(SecureAggregationError, match="only 3 clients signed"):
        Round(ids).advertise().share().mask().sign([0, 1, 2]).reveal()
    run = Round(ids).advertise().share().mask().reveal([0, 1, 2])
    with pytest.raises(SecureAggregationError, match="only 3 clients revealed"):
        run.station.result()
    with pytest.raises(SecureAggregationError, match="only 1 clients advertised"):
        Round([1]).advertise().station.directory()


def test_one_masked_vector_looks_uniform():
    run = Round([1, 2, 3], size=20_000).advertise().share()
    run.vectors[1][:] = 0.0  # the plainest of vectors
    masked = run.clients[1].mask([1, 2, 3], run.vectors[1])
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
    run = Round([1, 2, 3, 4]).advertise().share().mask([1, 2, 3]).sign()
    signatures = run.station.signatures()
    answer = json.loads(run.clients[1].reveal(signatures))
    assert set(answer["seeds"]) == {"1", "2", "3"}
    assert set(answer["keys"]) == {"4"}
    with pytest.raises(SecureAggregationError, match="client 1 is at stage 'finished'"):
        reload(run.clients[1]).reveal(signatures)


def test_what_masks_were_made_of_is_gone_once_they_are_on():
    run = Round([1, 2, 3]).advertise().share()
    secrets = {k: json.loads(run.clients[1].to_bytes())[k] for k in ("mask_key", "seed")}
    run.mask()
    kept = run.clients[1].to_bytes().decode()
    assert not any(secret in kept for secret in secrets.values())


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


def test_the_group_is_that_of_ed25519():
    """Public keys of another implementation come out, for keys of all kinds."""
    for _ in range(20):
        key = Ed25519PrivateKey.generate()
        half = bytearray(hashlib.sha512(key.private_bytes_raw()).digest()[:32])
        half[0] &= 248
        half[31] = half[31] & 127 | 64
        number = int.from_bytes(half, "little")
        point = edwards.multiply_base(number)
        assert edwards.compress(point) == key.public_key().public_bytes_raw()
        again = edwards.decompress(edwards.compress(point), "it")
        assert edwards.equal(again, point)
        one = edwards.multiply_base(1)
        assert edwards.equal(edwards.multiply(one, number), point)
    assert edwards.equal(edwards.multiply(one, edwards.ORDER), edwards.ZERO)
    refused = 0
    for y in range(2, 40):
        try:
            edwards.decompress(y.to_bytes(32, "little"), "it")
        except SecureAggregationError:
            refused += 1
    assert 8 < refused < 30, "half of all numbers are no point"
    for wrong in ((2**255 - 19).to_bytes(32, "little"), b"short"):
        with pytest.raises(SecureAggregationError, match="it is not a point"):
            edwards.decompress(wrong, "it")


@given(st.integers(1, 6), st.integers(0, 4), st.randoms())
@settings(deadline=None, max_examples=30)
def test_shamir(threshold, more, random):
    secret = shamir.new_secret()
    shares, data = shamir.split(secret, threshold, threshold + more)
    chosen = random.sample(range(1, threshold + more + 1), threshold)
    assert shamir.combine({x: shares[x - 1] for x in chosen}) == secret
    bound = shamir.Commitments.from_bytes(data, threshold, "it")
    assert bound.are_of(secret) and not bound.are_of(shamir.new_secret())
    for x, share in enumerate(shares, start=1):
        assert bound.allow(share, x)
        assert not bound.allow(shamir.new_secret(), x)
        assert threshold == 1 or not bound.allow(share, x + 1)
    assert not bound.allow(b"short", 1)
    assert not bound.allow(b"\xff" * 32, 1), "a number beyond the order is another spelling"
    if threshold > 1:
        assert shamir.combine({x: shares[x - 1] for x in chosen[1:]}) != secret


def test_a_state_from_disk_is_checked():
    with pytest.raises(SecureAggregationError, match="saved state"):
        SecureClient.from_bytes(b"{}")
    state = json.loads(SecureClient(1, b"session").to_bytes())
    state["seed"] = "00"
    with pytest.raises(SecureAggregationError, match="'seed' has 1 bytes"):
        SecureClient.from_bytes(json.dumps(state).encode())


def test_masking_a_lenet_among_twenty_clients_is_fast():
    ids = list(range(20))
    run = Round(ids, size=61_706).advertise()
    directory = run.station.directory()
    for i, client in run.clients.items():
        run.station.shared(i, client.share(directory))
    start = time.process_time()
    run.station.checked(0, run.clients[0].check(run.station.inbox(0)))
    assert time.process_time() - start < 1.5
    run.check(ids[1:])
    start = time.process_time()
    run.station.masked(0, run.clients[0].mask(run.station.participants(), run.vectors[0]))
    assert time.process_time() - start < 1.0
    run.mask(ids[1:16]).sign()
    start = time.process_time()
    run.reveal().check_sum(ids[:16])
    assert time.process_time() - start < 4.0
