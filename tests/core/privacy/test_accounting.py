"""The budget of a whole run: exact where a closed form exists, never optimistic elsewhere."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant, RDPAccountant

from hfedatm_core.privacy.accounting import (
    Budget,
    BudgetExceededError,
    Ledger,
    calibrate_sigma,
    gaussian_delta,
    gaussian_epsilon,
)

DELTA = 1e-5
spends = st.lists(
    st.tuples(st.floats(0.5, 50), st.sampled_from([1.0, 0.1, 0.01]), st.integers(1, 200)),
    min_size=1,
    max_size=5,
)


def test_known_values_of_the_analytic_gaussian_mechanism():
    # Balle and Wang's mechanism at (1, 1e-5) needs sigma = 3.7306, a published value.
    assert calibrate_sigma(Budget(1.0, DELTA), 1) == pytest.approx(3.7306, abs=1e-3)
    assert gaussian_delta(0.0, 1.0) == 0.0
    assert gaussian_delta(2.0, 0.0) == pytest.approx(math.erf(1 / math.sqrt(2)))


@given(st.floats(0.01, 20), st.floats(1e-9, 1e-2))
@settings(max_examples=50)
def test_epsilon_inverts_delta(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    if epsilon > 0:
        assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-6)
    else:
        assert gaussian_delta(mu, 0.0) <= delta


@pytest.mark.filterwarnings("ignore")  # of the accountants it is compared with
@pytest.mark.parametrize("epsilon", [4.0, 2.0, 1.0, 0.5, 0.1])
@pytest.mark.parametrize("releases", [1, 10, 600])
def test_calibrated_sigma_agrees_with_the_closed_form(epsilon, releases):
    sigma = calibrate_sigma(Budget(epsilon, DELTA), releases)
    # k releases at sigma are one release at sigma / sqrt(k)
    one = calibrate_sigma(Budget(epsilon, DELTA), 1)
    assert sigma == pytest.approx(one * math.sqrt(releases), rel=1e-4)
    # and an independent accountant agrees within 10 %, from above
    rdp = RDPAccountant()
    rdp.history = [(sigma, 1.0, releases)]
    orders = [1 + i / 10 for i in range(1, 100)] + [2**i for i in range(4, 14)]
    by_opacus = rdp.get_epsilon(DELTA, alphas=orders)
    assert epsilon * 0.999 <= by_opacus <= epsilon * 1.25
    high = [(sigma * 1.1, 1.0, releases)]
    prv = PRVAccountant()
    prv.history = high
    assert prv.get_epsilon(DELTA, eps_error=epsilon / 100) < epsilon
    prv.history = [(sigma / 1.1, 1.0, releases)]
    assert prv.get_epsilon(DELTA, eps_error=epsilon / 100) > epsilon


@given(spends)
@settings(max_examples=20)
def test_composition_does_not_depend_on_the_order(items):
    results = set()
    for order in itertools.islice(itertools.permutations(items), 6):
        results.add(Ledger().spend_history(order).epsilon(DELTA))
    assert len(results) == 1


@given(spends, spends)
@settings(max_examples=20)
def test_a_saved_ledger_resumes_exactly(before, after):
    straight = Ledger().spend_history(before).spend_history(after)
    saved = json.loads(json.dumps(Ledger().spend_history(before).to_dict()))
    resumed = Ledger.from_dict(saved).spend_history(after)
    assert resumed == straight
    assert resumed.epsilon(DELTA) == straight.epsilon(DELTA)


@given(spends)
@settings(max_examples=20)
def test_every_release_costs(items):
    spent = [0.0]
    ledger = Ledger()
    for item in items:
        ledger.spend_history([item])
        spent.append(ledger.epsilon(DELTA))
    assert spent == sorted(spent)


def test_dp_sgd_is_what_opacus_says():
    ledger = Ledger().spend_dp_sgd(1.1, 0.01, 1000)
    opacus = RDPAccountant()
    opacus.history = [(1.1, 0.01, 1000)]
    assert ledger.epsilon(DELTA) == pytest.approx(opacus.get_epsilon(DELTA), rel=1e-6)


@pytest.mark.parametrize("epsilon", [4.0, 1.0, 0.1])
def test_joint_calibration_uses_the_budget_and_no_more(epsilon):
    budget = Budget(epsilon, DELTA)
    sigma = calibrate_sigma(budget, 30, steps=500, sample_rate=0.05)
    whole = Ledger().spend_gaussian(sigma, 30).spend_dp_sgd(sigma, 0.05, 500)
    assert 0.999 * epsilon <= whole.epsilon(DELTA) <= epsilon * (1 + 1e-8)
    assert sigma > calibrate_sigma(budget, 30)


def test_gram_noise_for_a_fixed_dp_sgd_noise():
    budget = Budget(2.0, DELTA)
    sigma = calibrate_sigma(budget, 30, steps=100, sample_rate=0.05, sgd_sigma=2.0)
    whole = Ledger().spend_gaussian(sigma, 30).spend_dp_sgd(2.0, 0.05, 100)
    assert 1.99 <= whole.epsilon(DELTA) <= 2.0 * (1 + 1e-8)
    with pytest.raises(ValueError, match="no noise level reaches"):
        calibrate_sigma(Budget(0.1, DELTA), 30, steps=1000, sample_rate=0.5, sgd_sigma=0.5)


def test_calibration_counts_what_was_spent():
    budget = Budget(1.0, DELTA)
    spent = Ledger().spend_gaussian(10.0, 3)
    sigma = calibrate_sigma(budget, 5, spent=spent)
    assert sigma > calibrate_sigma(budget, 5)
    assert not spent.would_exceed(budget, Ledger().spend_gaussian(sigma, 5))
    assert spent.would_exceed(budget, Ledger().spend_gaussian(sigma, 6))


def test_a_calibrated_run_fits_to_its_last_round_and_not_beyond():
    budget, rounds, layers = Budget(0.5, DELTA), 7, 3
    sigma = calibrate_sigma(budget, rounds * layers)
    ledger, plan = Ledger(), Ledger().spend_gaussian(sigma, layers)
    for _ in range(rounds):
        ledger.require(budget, plan)
        ledger = ledger + plan
    before = ledger.to_dict()
    with pytest.raises(BudgetExceededError, match="client-3 has spent epsilon = 0.5 of 0.5"):
        ledger.require(budget, plan, who="client-3")
    assert ledger.to_dict() == before


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf])
def test_impossible_noise_is_refused(sigma):
    with pytest.raises(ValueError, match="noise multiplier"):
        Ledger().spend_gaussian(sigma)


def test_other_bad_input_is_refused():
    with pytest.raises(ValueError, match="sample rate"):
        Ledger().spend_dp_sgd(1.0, 1.5, 1)
    with pytest.raises(ValueError, match="negative"):
        Ledger().spend_gaussian(1.0, -1)
    with pytest.raises(ValueError, match="delta"):
        Ledger().epsilon(0.0)
    with pytest.raises(ValueError, match="epsilon"):
        Budget(0.0, DELTA)
    with pytest.raises(ValueError, match="nothing to calibrate"):
        calibrate_sigma(Budget(1.0, DELTA), 0)
    for broken in ({}, {"mechanism": "prv", "history": []}, {"mechanism": "rdp", "history": [[1]]}):
        with pytest.raises(ValueError, match="not readable"):
            Ledger.from_dict(broken)
    assert Ledger().epsilon(DELTA) == 0.0
