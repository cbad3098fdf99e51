"""HFedATM: align the stations' channels by optimal transport, then merge by RegMean.

The merged model is published. The setting ``broadcast`` chooses the model that the stations train
next. By default it is the mean of the aligned stations, which was the better start on the data
tried so far. If alignment moved a channel, it is the merged model, because the mean of stations
that do not share a start is no model to train on. The paper sends out the merged model every round.

Nguyen et al., "HFedATM: Hierarchical Federated Domain Generalization via Optimal Transport and
Regularized Mean Aggregation", arXiv:2508.05135.

RegMean: Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models",
arXiv:2212.09849.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from hfedatm.base.building import measures_all
from hfedatm.base.errors import UserError
from hfedatm.base.settings import Settings
from hfedatm.base.tiers import has_lowest, is_deep
from hfedatm.contracts import Paced, Situation, State, option
from hfedatm_core import AlignmentOptions, Combined, Merged, Update, combine, merge, merge_apart
from hfedatm_core.adapters import is_lora
from hfedatm_core.averaging import between
from server_app.apart_checks import Apart


@dataclass
class HFedATM(Paced):
    """Both halves of the method; the ablations switch one of them off.

    With the RegMean model ``R`` and the mean of the aligned stations ``A``, the published model is
    ``A + beta (R - A)``.
    """

    needs_grams: ClassVar[bool] = True
    merges_apart: ClassVar[bool] = True
    fot: ClassVar[bool] = True
    regmean: ClassVar[bool] = True
    passes_products: ClassVar[bool] = True

    broadcast: Literal["auto", "merged", "average"] = option(
        "auto",
        "model that the stations train next: merged is the published model, average the mean of "
        "the aligned stations, auto this mean unless alignment moved a channel",
        setting=True,
    )
    reference: Literal["auto", "first", "previous", "medoid"] = option(
        "auto",
        "channel order that all stations take: the first station's, that of the last global "
        "model, or that of the station closest to all others; auto: the first station's, and in a "
        "tree of more levels that of the last global model",
        setting=True,
    )
    ot_solver: Literal["sinkhorn", "exact"] = option(
        "sinkhorn", "assign channels by the entropic plan, or by the cost itself", setting=True
    )
    ot_scope: Literal["conv", "all"] = option(
        "conv", "align outputs of convolutions, or also hidden units of Linear", setting=True
    )
    ot_reg: float = option(
        0.05, "entropic regularisation of the transport plan", setting=True, gt=0
    )
    ot_iterations: int = option(25, "iterations of Sinkhorn's algorithm", setting=True, ge=1)
    ot_margin: float = option(
        0.0, "relative gain a permutation must bring", setting=True, ge=0, lt=1
    )
    ridge: float = option(
        1e-6, "ridge of RegMean, relative to the mean diagonal", setting=True, ge=0
    )
    ridge_scale: Literal["mean", "feature"] = option(
        "mean", "scale of the ridge: the mean diagonal, or each feature's own entry"
    )
    regmean_weights: Literal["clients", "examples"] = option(
        "clients", "number that weighs a station's Gram in RegMean", setting=True
    )
    beta: float = option(
        1.0,
        "share of RegMean in round 1; 1 is the paper's merge, 0 the mean of the aligned stations, "
        "more than 1 goes past the merge (stations that did not share a start count it as 1)",
        ge=0,
        le=2,
    )
    beta_end: float = option(
        -1.0,
        "share of RegMean in the last round, reached in equal steps; -1 keeps beta throughout",
        ge=-1,
        le=2,
    )
    every: int = option(
        1,
        "merge by RegMean in every n-th round and in the last, average in between; no Gram is "
        "sent in a round that needs none",
        ge=1,
    )
    momentum: float = option(
        0.0,
        "momentum of the server: the sent model moves by v <- momentum v + (new - previous)",
        ge=0,
        lt=1,
    )
    pool_variances: bool = option(
        False,
        "merge BatchNorm's variances as those of all stations' data together, not by their mean",
    )

    second_look: Literal["never", "auto", "always"] = option(
        "never",
        "measure BatchNorm statistics of the merged model at the clients: after a merge of "
        "stations that did not share a start (auto), or after every merge",
    )
    look_passes: int = option(
        1,
        "passes of a second look: after n passes the statistics of the first n BatchNorms in a row "
        "are exact",
        ge=1,
        le=100,
    )

    refine: bool = option(
        False,
        "after a merge of stations that did not share a start, fit each layer to the inputs that "
        "it really gets: clients compare the merged model with their station's, which owners must "
        "allow (privacy.refine)",
    )
    refine_layers: int = option(
        1,
        "layers that one exchange of refining fits; more need fewer exchanges, but each is fitted "
        "to inputs that the others change",
        ge=1,
        le=1000,
    )

    profiles: bool = option(
        False,
        "match stations that did not share a start by class profiles, too: clients send mean "
        "activations per class, which owners must allow (privacy.class-profiles)",
    )
    profile_examples: int = option(
        16, "fewest examples of a class whose mean activations a client sends", ge=2
    )

    def __post_init__(self) -> None:
        """Check the conditions that bounds on single parameters cannot express."""
        if -1 < self.beta_end < 0:
            raise ValueError(f"beta_end must be -1 or lie in [0, 2], got {self.beta_end}")
        if not self.regmean and (self.beta, self.beta_end, self.every) != (1.0, -1.0, 1):
            raise ValueError(
                "beta, beta_end and every configure RegMean, which this rule does not use"
            )
        self._velocity: State = {}
        self._start: State = {}

    def wants_grams(self, round: int, rounds: int) -> bool:
        """Return whether RegMean contributes to this round's model."""
        return self.needs_grams and (round % self.every == 0 or round == rounds)

    def looks_again(self, settings: Settings, round: int) -> int:
        """Return how many passes ``second_look`` asks for after this round's merge."""
        apart = settings.station_start == "own" and round == 1
        due = self.second_look == "always" or (self.second_look == "auto" and apart)
        return self.look_passes if due else 0

    def refines(self, settings: Settings, round: int) -> int:
        """Return ``refine_layers`` if this round merges stations that did not share a start."""
        wanted = self.refine and self.wants_grams(round, settings.rounds)
        return self.refine_layers if wanted and measures_all(settings, round) else 0

    def wants_profiles(self, settings: Settings, round: int) -> int:
        """Return ``profile_examples`` if this round matches stations by class profiles."""
        wanted = self.profiles and self.wants_grams(round, settings.rounds)
        return self.profile_examples if wanted and measures_all(settings, round) else 0

    def check(self, settings: Settings) -> None:
        """Refuse options that nothing would use, or that would send exact beside hidden numbers.

        A share of RegMean is refused for adapters: a mixture of factors mixes no products.
        """
        super().check(settings)
        if is_lora(settings.train_only) and (self.beta, self.beta_end) != (1.0, -1.0):
            raise UserError(
                "rule-params: beta and beta_end mix tensors one by one, which does not mix what "
                "adapters compute: leave them out with train-only=lora"
            )
        apart = Apart(settings, merges=self.fot and self.regmean)
        if self.profiles:
            apart.check("profiles=true", "exact class means")
            apart.check_classes("profiles=true")
        if self.refine:
            apart.check("refine=true", "exact sums over layers")
            apart.check_together("refine=true", bool(self.buffer))

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Align and merge; without a common start, the Grams of all layers match the stations."""
        solving = self.regmean and self.wants_grams(situation.round, situation.settings.rounds)
        beta = self._share(situation)
        if solving and measures_all(situation.settings, situation.round):
            beta = min(beta, 1.0)  # their mean is no model, so neither is a point on its far side
            merged = merge_apart(
                updates, situation.graph, coefficients=self.regmean_weights, ridge=self.ridge
            )
        else:
            merged = self._merge_related(updates, situation, solving)
            if is_deep(situation.settings) and self.fot:
                unaligned = replace(merged.report, unaligned=situation.graph.unaligned)
                merged = replace(merged, report=unaligned)
        if beta != 1.0:
            merged = replace(merged, state=between(merged.average, merged.state, beta))
        unmoved = self.broadcast == "auto" and not merged.moved
        average_out = self.broadcast == "average" or unmoved
        self._start = merged.average if average_out else merged.state
        if self.momentum:
            self._start = self._moved(situation.previous, self._start)
            if not average_out:
                merged = replace(merged, state=self._start)
        return merged

    def _merge_related(
        self, updates: Iterable[Update], situation: Situation, solving: bool
    ) -> Merged:
        """Align and merge as the paper does; a medoid needs all stations in memory.

        In a tree of more levels the stations below have been aligned to the model they were sent.
        """
        deep = is_deep(situation.settings)
        reference = "first" if self.reference == "auto" else self.reference
        return merge(
            list(updates) if reference == "medoid" else updates,
            situation.graph,
            fot=self.fot and not deep,
            regmean=solving,
            reference="previous" if deep else reference,
            previous=situation.previous,
            alignment=self._alignment(),
            ridge=self.ridge,
            ridge_scale=self.ridge_scale,
            coefficients=self.regmean_weights,
            pool_variances=self.pool_variances,
        )

    def combine(self, updates: Iterable[Update], situation: Situation) -> Combined:
        """Align stations with clients to the model that the server sent; sum what `merge` needs."""
        return combine(
            updates,
            situation.previous,
            situation.graph,
            fot=self.fot and has_lowest(situation.settings, situation.level),
            regmean=self.regmean,
            coefficients=self.regmean_weights,
            alignment=self._alignment(),
            pool_variances=self.pool_variances,
        )

    def check_tiers(self, settings: Settings) -> None:
        """Refuse a channel order that stations below the server cannot know, and adapters."""
        if self.regmean and is_lora(settings.train_only):
            raise UserError(
                f"train-only: got {settings.train_only!r}; with tiers={settings.tiers} stations "
                "send products of Grams and weights, and the weight of an adapter is a product "
                "itself: choose server-rule=avg, or two tiers"
            )
        if self.fot and self.reference not in ("auto", "previous"):
            raise UserError(
                f"reference: got {self.reference!r}; with tiers={settings.tiers} stations align "
                "their own stations, and know only the model that the server sent: choose previous"
            )

    def _alignment(self) -> AlignmentOptions:
        return AlignmentOptions(
            solver=self.ot_solver,
            scope=self.ot_scope,
            reg=self.ot_reg,
            iterations=self.ot_iterations,
            margin=self.ot_margin,
        )

    def next_start(self, merged: Merged) -> State:
        """Return the model chosen by ``broadcast``."""
        return self._start

    def remember(self) -> State:
        """Keep the velocity of the server."""
        return self._velocity

    def restore(self, memory: State) -> None:
        """Restore the velocity of the server."""
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
