"""HFedATM: align the stations' channels by optimal transport, then merge by RegMean.

The merged model is published. What the stations go on from is the setting ``broadcast``: by default
the mean of the aligned stations, which was the better start on the data tried so far; but the
merged model where a channel had to be moved, because the mean of stations that do not share a start
is no model to train on. The paper sends the merged model out in every round.

Nguyen et al., "HFedATM: Hierarchical Federated Domain Generalization via Optimal Transport and
Regularized Mean Aggregation", arXiv:2508.05135.

RegMean: Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models",
arXiv:2212.09849.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from hfedatm.contracts import Rule, Situation, State
from hfedatm_core import Merged, Update, merge


@dataclass
class HFedATM(Rule):
    """Both halves of the method; the ablations switch one of them off.

    With the RegMean model ``R`` and the mean of the aligned stations ``A``, the published model is
    ``A + beta (R - A)``.

    Parameters
    ----------
    beta
        Share of RegMean in round 1; 1 is the paper's merge, 0 the mean of the aligned stations.
    beta_end
        Share in the last round, reached in equal steps; -1 keeps ``beta`` throughout.
    every
        Merge by RegMean in every n-th round and in the last, average in between; no Gram is sent
        in a round that needs none.
    momentum
        Of the server: what is sent out moves by ``v <- momentum v + (new - previous)``.
    pool_variances
        Merge BatchNorm's variances as those of all stations' data together, not by their mean.
    """

    needs_grams: ClassVar[bool] = True
    fot: ClassVar[bool] = True
    regmean: ClassVar[bool] = True

    beta: float = 1.0
    beta_end: float = -1.0
    every: int = 1
    momentum: float = 0.0
    pool_variances: bool = False

    def __post_init__(self) -> None:
        """Check the parameters."""
        if not 0 <= self.beta <= 1 or not (self.beta_end == -1 or 0 <= self.beta_end <= 1):
            raise ValueError(
                f"beta and beta_end must lie in [0, 1], got {self.beta} and {self.beta_end}"
            )
        if self.every < 1 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"every must be at least 1 and momentum in [0, 1), got {self.every} and "
                f"{self.momentum}"
            )
        if not self.regmean and (self.beta, self.beta_end, self.every) != (1.0, -1.0, 1):
            raise ValueError(
                "beta, beta_end and every are about RegMean, which this rule leaves out"
            )
        self._velocity: State = {}
        self._start: State = {}

    def wants_grams(self, round: int, rounds: int) -> bool:
        """Return whether RegMean takes part in this round's model."""
        return self.needs_grams and (round % self.every == 0 or round == rounds)

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Align and merge with the options of the settings."""
        s = situation.settings
        merged = merge(
            updates,
            situation.graph,
            fot=self.fot,
            regmean=self.regmean and self.wants_grams(situation.round, s.rounds),
            reference=s.reference,
            previous=situation.previous,
            solver=s.ot_solver,
            scope=s.ot_scope,
            reg=s.ot_reg,
            iterations=s.ot_iterations,
            margin=s.ot_margin,
            ridge=s.ridge,
            coefficients=s.regmean_weights,
            pool_variances=self.pool_variances,
        )
        beta = self._share(situation)
        if beta != 1.0:
            merged = replace(merged, state=_between(merged.average, merged.state, beta))
        average_out = s.broadcast == "average" or (s.broadcast == "auto" and not merged.moved)
        self._start = merged.average if average_out else merged.state
        if self.momentum:
            self._start = self._moved(situation.previous, self._start)
            if not average_out:
                merged = replace(merged, state=self._start)
        return merged

    def next_start(self, merged: Merged) -> State:
        """Return the model chosen by the setting ``broadcast``."""
        return self._start

    def remember(self) -> State:
        """Keep the velocity of the server."""
        return self._velocity

    def restore(self, memory: State) -> None:
        """Take up the velocity of the server."""
        self._velocity = memory

    def _share(self, situation: Situation) -> float:
        if self.beta_end == -1:
            return self.beta
        done = (situation.round - 1) / max(1, situation.settings.rounds - 1)
        return self.beta + done * (self.beta_end - self.beta)

    def _moved(self, previous: State, new: State) -> State:
        step = {n: new[n] - old for n, old in previous.items() if old.is_floating_point()}
        old = self._velocity
        self._velocity = {n: self.momentum * old[n] + d if old else d for n, d in step.items()}
        return {n: previous[n] + self._velocity[n] if n in step else t for n, t in new.items()}


def _between(one: State, other: State, share: float) -> State:
    """Return ``one + share (other - one)``; counts, which are no numbers to mix, from ``one``."""
    return {
        name: value.lerp(other[name], share) if value.is_floating_point() else value
        for name, value in one.items()
    }
