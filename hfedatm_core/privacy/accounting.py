"""The part of its privacy budget that a client has spent, over the whole run.

Everything a client releases is a Gaussian mechanism: a noised Gram is one release at sample rate 1,
a DP-SGD step is one Poisson-subsampled release. One :class:`Ledger` per client composes them all
(layers x rounds x participation) and survives a restart.

The conversion to ``epsilon`` is exact for Gram releases alone (the analytic Gaussian mechanism) and
by the Opacus RDP accountant once DP-SGD steps are among them. Both are upper bounds on the truth;
switching from the first to the second never lowers the reported ``epsilon``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis import rdp
from scipy.optimize import brentq
from scipy.special import log_ndtr

# Opacus stops at order 63, which cannot certify an epsilon below ~0.2 at delta = 1e-5. The larger
# orders take the floor down to 0.004. Orders below 1.5 matter for an epsilon beyond 20 only, and
# their series converge so slowly at sample rate 1/2 that they would take nearly all of the time.
_ORDERS: tuple[float, ...] = (
    *(order for order in RDPAccountant.DEFAULT_ALPHAS if order >= 1.5),
    *(64, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048),
)
_SIGMA_RANGE = (1e-2, 1e7)
_RELATIVE_SLACK = 1e-9  # rounding error of sums of releases, which is negligible


class BudgetExceededError(RuntimeError):
    """A planned release would take a client past its (epsilon, delta) budget."""


@dataclass(frozen=True)
class Budget:
    """The (epsilon, delta) a client may spend in the whole run."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ValueError(f"epsilon must be a positive number, got {self.epsilon}")
        _check_delta(self.delta)


@dataclass
class Ledger:
    """All releases of one client, composed.

    ``releases`` maps (noise multiplier, sample rate) to how often it was spent. Composition does
    not depend on the order, so the order is not kept.
    """

    releases: dict[tuple[float, float], int] = field(default_factory=dict)

    def spend_gaussian(self, sigma: float, count: int = 1) -> Ledger:
        """Record ``count`` releases with noise of standard deviation ``sigma`` x sensitivity."""
        return self._spend(sigma, 1.0, count)

    def spend_dp_sgd(self, sigma: float, sample_rate: float, steps: int) -> Ledger:
        """Record ``steps`` DP-SGD steps on Poisson batches of expected share ``sample_rate``."""
        return self._spend(sigma, sample_rate, steps)

    def spend_history(self, history: Sequence[tuple[float, float, int]]) -> Ledger:
        """Record the history of an Opacus accountant (``PrivacyEngine.accountant.history``)."""
        for sigma, sample_rate, steps in history:
            self._spend(sigma, sample_rate, steps)
        return self

    def _spend(self, sigma: float, sample_rate: float, count: int) -> Ledger:
        if not (math.isfinite(sigma) and sigma > 0):
            raise ValueError(f"the noise multiplier must be a positive number, got {sigma}")
        if not 0 < sample_rate <= 1:
            raise ValueError(f"the sample rate must be in (0, 1], got {sample_rate}")
        if count < 0:
            raise ValueError(f"a count of releases cannot be negative, got {count}")
        if count:
            key = (float(sigma), float(sample_rate))
            self.releases[key] = self.releases.get(key, 0) + int(count)
        return self

    def __add__(self, other: Ledger) -> Ledger:
        """Compose two ledgers into a new one."""
        return Ledger(dict(self.releases)).spend_history(other.accountant().history)

    def accountant(self) -> RDPAccountant:
        """Return the Opacus accountant that has seen these releases (in canonical order)."""
        accountant = RDPAccountant()
        accountant.history = [(*key, count) for key, count in sorted(self.releases.items())]
        return accountant

    def epsilon(self, delta: float) -> float:
        """Return the smallest certified ``epsilon`` at ``delta`` (0 when nothing was released)."""
        _check_delta(delta)
        if all(sample_rate == 1.0 for _, sample_rate in self.releases):
            return gaussian_epsilon(self._mu(), delta)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Optimal order is the")
            curve = sum(n * _rdp_of_one(*key) for key, n in sorted(self.releases.items()))
            spent, _ = rdp.get_privacy_spent(orders=_ORDERS, rdp=curve, delta=delta)
        return max(0.0, float(spent))

    def _mu(self) -> float:
        """Return mu of the Gaussian releases: k releases at sigma equal one at sigma / sqrt(k)."""
        items = sorted(self.releases.items())
        return math.sqrt(math.fsum(count / sigma**2 for (sigma, _), count in items))

    def would_exceed(self, budget: Budget, planned: Ledger | None = None) -> bool:
        """Whether this ledger plus ``planned`` is beyond ``budget``."""
        total = self + planned if planned is not None else self
        return total.epsilon(budget.delta) > budget.epsilon * (1 + _RELATIVE_SLACK)

    def require(self, budget: Budget, planned: Ledger, *, who: str = "this client") -> None:
        """Raise :class:`BudgetExceededError` if ``planned`` does not fit into ``budget``."""
        if self.would_exceed(budget, planned):
            spent, after = self.epsilon(budget.delta), (self + planned).epsilon(budget.delta)
            raise BudgetExceededError(
                f"{who} has spent epsilon = {spent:.4g} of {budget.epsilon:.4g} at delta = "
                f"{budget.delta:.3g}; this round would bring it to {after:.4g}. Stop here, or "
                "start a run with a larger epsilon, a larger sigma or fewer rounds."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON data (the state dict of the Opacus accountant)."""
        history = [list(entry) for entry in self.accountant().history]
        return {"mechanism": RDPAccountant.mechanism(), "history": history}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Ledger:
        """Restore a ledger from :meth:`to_dict`, exactly."""
        accountant = RDPAccountant()
        try:
            accountant.load_state_dict(dict(state))
            return cls().spend_history([(s, q, int(n)) for s, q, n in accountant.history])
        except (TypeError, ValueError) as error:
            raise ValueError(f"the saved privacy ledger is not readable: {error}") from error


@lru_cache(maxsize=4096)
def _rdp_of_one(sigma: float, sample_rate: float) -> npt.NDArray[np.float64]:
    """Return the RDP curve of one release, which takes up to half a second to compute."""
    curve = rdp.compute_rdp(q=sample_rate, noise_multiplier=sigma, steps=1, orders=_ORDERS)
    return np.asarray(curve, dtype=np.float64)


def gaussian_delta(mu: float, epsilon: float) -> float:
    r"""Return the exact delta of Gaussian noise whose sensitivity is ``mu`` standard deviations.

    .. math:: \delta = \Phi(\mu/2 - \epsilon/\mu) - e^\epsilon \Phi(-\mu/2 - \epsilon/\mu)

    References
    ----------
    Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018,
    arXiv:1805.06530.
    """
    if mu == 0:
        return 0.0
    above = log_ndtr(mu / 2 - epsilon / mu)
    below = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(-math.exp(above) * math.expm1(min(below - above, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Invert :func:`gaussian_delta` in ``epsilon``; k releases at sigma have mu = sqrt(k)/sigma."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(mu, high) > delta:
        high *= 2
    return float(brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, high, xtol=1e-13, rtol=1e-13))


def calibrate_sigma(
    budget: Budget,
    releases: int,
    *,
    steps: int = 0,
    sample_rate: float = 1.0,
    sgd_sigma: float | None = None,
    spent: Ledger | None = None,
) -> float:
    """Return the smallest noise multiplier that keeps a whole run within ``budget``.

    Parameters
    ----------
    budget
        The budget of the run.
    releases
        Gram releases of the client in the whole run: layers x global rounds it takes part in.
    steps, sample_rate
        DP-SGD steps of the whole run and the share of examples in a batch.
    sgd_sigma
        Noise multiplier of those steps, if it is fixed; without it, Grams and steps use one sigma.
    spent
        The ledger of earlier releases.

    Returns
    -------
    float
        Sigma, in units of the sensitivity. With it the run never exceeds the budget, not even by
        rounding.
    """
    if releases < 0 or steps < 0 or releases + steps == 0:
        raise ValueError(f"nothing to calibrate: {releases} Gram releases, {steps} DP-SGD steps")
    if releases == 0 and sgd_sigma is not None:
        raise ValueError("sgd_sigma is fixed and there are no Gram releases: nothing to calibrate")
    before = Ledger() if spent is None else spent

    def plan(sigma: float) -> Ledger:
        planned = Ledger().spend_gaussian(sigma, releases)
        return planned.spend_dp_sgd(sgd_sigma or sigma, sample_rate, steps)

    def log_ratio(log_sigma: float) -> float:
        epsilon = (before + plan(math.exp(log_sigma))).epsilon(budget.delta)
        return math.log(max(epsilon, 1e-300) / budget.epsilon)

    low, high = (math.log(sigma) for sigma in _SIGMA_RANGE)
    if log_ratio(high) > 0:
        raise ValueError(
            f"no noise level reaches epsilon = {budget.epsilon:.4g} at delta = {budget.delta:.3g}: "
            "what is fixed or already spent (or the accountant's floor of about 0.004 for DP-SGD) "
            "takes more. Raise epsilon, or the noise of DP-SGD."
        )
    if log_ratio(low) <= 0:
        return _SIGMA_RANGE[0]
    root = float(brentq(log_ratio, low, high, xtol=1e-7))
    # The root finder may miss the budget by its tolerance.
    while log_ratio(root) > 0:
        root += 1e-7
    return math.exp(root)


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(
            f"delta must be between 0 and 1 (below 1 / number of examples), got {delta}"
        )
