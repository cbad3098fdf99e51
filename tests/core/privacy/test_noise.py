"""The noise is normal, independent, and different every time unless a seed is forced."""

import logging

import numpy as np
import pytest
from scipy import stats

from hfedatm_core.privacy.keystream import Keystream
from hfedatm_core.privacy.noise import NoiseSource, shared_noise_std, triangle_noise


def test_the_noise_is_standard_normal_and_uncorrelated():
    draws = NoiseSource(insecure_dp_seed=1).normal(200_000)
    assert stats.kstest(draws, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01
    half = draws.size // 2
    assert abs(np.corrcoef(draws[:half], draws[half:])[0, 1]) < 0.01
    assert stats.kurtosis(draws) == pytest.approx(0, abs=0.05)


def test_long_and_short_draws_have_the_right_length():
    for count in (0, 1, 2, 3, (1 << 20) + 1):
        assert NoiseSource().normal(count).shape == (count,)


def test_noise_is_fresh_by_default():
    assert not np.array_equal(NoiseSource().normal(8), NoiseSource().normal(8))
    source = NoiseSource()
    assert not np.array_equal(source.normal(8), source.normal(8))


def test_a_seed_is_reproducible_by_context_and_logged(caplog):
    with caplog.at_level(logging.WARNING):
        first = NoiseSource(7, "client-1/round-1").normal(8)
    assert "insecure-dp-seed" in caplog.text
    assert np.array_equal(first, NoiseSource(7, "client-1/round-1").normal(8))
    assert not np.array_equal(first, NoiseSource(7, "client-1/round-2").normal(8))


def test_triangle_noise_has_the_stated_spread():
    noise = triangle_noise(400, 3.0, NoiseSource(insecure_dp_seed=2)).numpy()
    assert noise.size == 400 * 401 // 2
    # chi-square of the variance, five standard errors
    assert noise.var() == pytest.approx(9.0, abs=5 * 9 * np.sqrt(2 / noise.size))
    assert noise.mean() == pytest.approx(0.0, abs=5 * 3 / np.sqrt(noise.size))
    with pytest.raises(ValueError, match="standard deviation"):
        triangle_noise(3, float("nan"), NoiseSource())


def test_shared_noise_sums_to_the_whole():
    share = shared_noise_std(6.0, 9)
    assert share == 2.0
    total = sum(NoiseSource(3, str(i)).normal(50_000) * share for i in range(9))
    assert total.std() == pytest.approx(6.0, rel=0.02)
    with pytest.raises(ValueError, match="at least one"):
        shared_noise_std(1.0, 0)


def test_keystream_reads_on_and_checks_its_key():
    key = bytes(32)
    whole = Keystream(key).read(100)
    parts = Keystream(key)
    assert parts.read(33) + parts.read(67) == whole
    # first block of ChaCha20 for the all-zero key and nonce (RFC 8439, appendix A.1)
    assert whole[:8].hex() == "76b8e0ada0f13d90"
    with pytest.raises(ValueError, match="32 bytes"):
        Keystream(b"short")
