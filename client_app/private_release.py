"""A client's privacy: its noise, the budget it has left, and the releases it has made.

The noise multiplier is fixed once, before a client's first release, so that the whole run (every
Gram of every round, every DP-SGD step) stays within the budget if the client takes part in all of
it. The client books every release in its ledger, and refuses work that its budget does not cover.
If its data have an owner, it also refuses work that exceeds the owner's budget for all runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from client_app.ledger import Account, LedgerFile, compact
from hfedatm.base.building import build_rule
from hfedatm.base.errors import UserError
from hfedatm.base.privacy_settings import gram_mechanism, secure_threshold
from hfedatm.base.records import Task
from hfedatm.base.tiers import local_rounds
from hfedatm.base.trust.checking import check_sigma
from hfedatm.base.trust.policy import Policy, PolicyRefusal
from hfedatm_core import Gram
from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.privacy.accounting import Budget, Ledger, calibrate_sigma
from hfedatm_core.privacy.noise import NoiseSource
from hfedatm_core.privacy.release import GramRelease

LEAST_SHARED_NOISE = 2.0**-26
"""64 steps of the fixed point. Each client rounds its own share of the noise, and only the sum of
all shares is the full noise; a sum of Gaussians rounded so finely is a rounded Gaussian up to
exp(-2 pi^2 64^2)."""


class ClientPrivacy:
    """The privacy of one client while it handles one message.

    Parameters
    ----------
    task
        Task that the client is asked to do.
    examples
        Number of its training examples.
    grams
        How many distinct Grams a round of this model has.
    file
        Where the client keeps its ledger.
    """

    def __init__(self, task: Task, examples: int, grams: int, file: LedgerFile) -> None:
        self.task, self.settings = task, task.settings
        self.mechanism = gram_mechanism(self.settings)
        self.examples, self.grams = examples, grams
        self._file = file
        self._policy = Policy.current()
        s = self.settings
        self.sample_rate = min(1.0, s.batch_size / examples)
        self.steps = s.local_epochs * math.ceil(examples / s.batch_size)
        most = min(s.privacy_epsilon or math.inf, self._policy.privacy.run_epsilon or math.inf)
        self.budget = Budget(most, s.privacy_delta) if math.isfinite(most) else None
        self.sigma: float = self._file.read().sigma or s.privacy_sigma or self._calibrated()
        check_sigma(self._policy, self.sigma)

    def require(self) -> None:
        """Raise `BudgetExceededError` if this message's releases do not fit the budget."""
        self._require(self._file.read())

    def spend(self) -> float:
        """Book this message's releases and return the epsilon spent so far.

        Call it after the work and before the reply: an unbooked release must not leave.
        """
        with self._file.lock():
            account = self._file.read()
            self._require(account)
            account.sigma = account.sigma or self.sigma
            account.ledger += self.cost()
            account.total = compact(account.total + self.cost_of_one_example())
            if limit := self._limit():
                account.left = limit.epsilon - account.total.epsilon(limit.delta)
            self._file.write(account)
        return account.ledger.epsilon(self.settings.privacy_delta)

    def cost(self) -> Ledger:
        """Return the releases in the reply to this message."""
        ledger = Ledger()
        if self.settings.dp_sgd and self.task.kind == "train":
            ledger.spend_dp_sgd(self.sigma, self.sample_rate, self.steps)
            ledger.spend_gaussian(self.sigma)  # the reported loss
        if self.task.send_grams or self.task.kind == "measure":
            # none are noised, and none counted, without a mechanism
            ledger.spend_gaussian(self.sigma, self.grams)
        return ledger

    def cost_of_one_example(self) -> Ledger:
        """Return the releases that this message adds to the account of the data, per example.

        One example may turn a client's Gram into any other. Noise that hides whether a client
        takes part hides this larger change less well.
        """
        if self.settings.dp_sgd:  # then the Grams carry the noise for such a change, too
            return self.cost()
        weaker = self.mechanism.sigma_of_one_example
        releases = self.cost().releases.items()
        return Ledger({(sigma * weaker, rate): count for (sigma, rate), count in releases})

    def release(self, grams: Mapping[str, Gram], examples: int, asked: int) -> dict[str, Gram]:
        """Return the Grams to send.

        Parameters
        ----------
        grams
            As collected, from clipped examples if the mechanism clips them.
        examples
            Number of examples the Grams were made of.
        asked
            Clients that take part in the secure sum; 1 without one.
        """
        if len(distinct(grams)) > self.grams:
            raise RuntimeError(f"{len(distinct(grams))} Grams, but {self.grams} were planned")
        s = self.settings
        release = GramRelease(
            self.mechanism,
            self.sigma,
            honest_survivors=secure_threshold(s, asked) if s.secure_aggregation else 1,
            # DP-SGD protects one example, so the Grams' noise must hide one example's influence.
            adjacency=self.mechanism.change_by_one_example if s.dp_sgd else "zero-out",
        )
        if s.secure_aggregation:
            narrowest = min(gram.dim for gram in grams.values())
            if release.noise_std(narrowest) < LEAST_SHARED_NOISE:
                raise UserError(
                    f"privacy.clip = {s.privacy_clip:g} gives noise with standard deviation "
                    f"{release.noise_std(narrowest):.2g}, which the fixed point of a secure sum "
                    f"would round away; it must be at least {LEAST_SHARED_NOISE:.2g}"
                )
        return release.privatise(grams, examples, self.source("grams"))

    def source(self, purpose: str) -> NoiseSource:
        """Return noise for one purpose of this message."""
        seed = self.settings.privacy_insecure_dp_seed
        t = self.task
        context = f"client-{t.client}/{t.round}.{t.station_round}/{purpose}"
        return NoiseSource(None if seed < 0 else seed, context)

    def _require(self, account: Account) -> None:
        if self.budget:
            account.ledger.require(self.budget, self.cost(), who=f"client {self.task.client}")
        limit = self._limit()
        if limit is None:
            return
        planned = self.cost_of_one_example()
        if account.total.would_exceed(limit, planned):
            after = (account.total + planned).epsilon(limit.delta)
            raise PolicyRefusal(
                f"privacy.epsilon: with this reply all runs on these data would have spent "
                f"{after:.4g} at delta = {limit.delta:.3g}; the owner of this node allows at most "
                f"{limit.epsilon:g} (policy: privacy.total-epsilon)"
            )

    def _limit(self) -> Budget | None:
        """Return what the owner allows all runs on these data to spend together."""
        allowed = self._policy.privacy
        if allowed.total_epsilon is None:
            return None
        return Budget(allowed.total_epsilon, allowed.most_delta or 1e-5)

    def _calibrated(self) -> float:
        assert self.budget is not None, "settings demand epsilon or sigma"
        s, rule = self.settings, build_rule(self.settings)
        rounds = sum(rule.wants_grams(r, s.rounds) for r in range(1, s.rounds + 1))
        trainings = s.rounds * local_rounds(s) if s.dp_sgd else 0
        return calibrate_sigma(
            self.budget,
            self.grams * rounds + trainings,
            steps=self.steps * trainings,
            sample_rate=self.sample_rate,
        )
