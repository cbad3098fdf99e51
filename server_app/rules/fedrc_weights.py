"""FedRC (Kou et al., 2024): weigh a node by the closeness of its data to its parent's.

The clustering method of the same name is the rule ``fedrc-clusters``.

Every node summarises its data by a Gaussian: the mean and variance of all its input values. A
parent's Gaussian is that of its children's data together. The weight of a child follows from the
Bhattacharyya distance between its Gaussian and its parent's,

    D = (mu1 - mu2)^2 / (4 (s1^2 + s2^2)) + ln((s1^2 + s2^2) / (2 s1 s2)) / 2 .

The paper does not say how the distance becomes a weight; here it is ``softmax(-D)`` over the
children of one parent, at every tier. The input values are those the network gets: normalised
pixels, or the numbers of the tokens that are not padding.

The clients share their first two moments before each global round. A station averages them by
examples, which gives exactly the moments of their data together. The server, and in a deeper tree a
station of stations, keeps its stations' models in memory until it knows every station's summary.

Kou et al., "FedRC: A Rapid-Converged Hierarchical Federated Learning Framework in Street Scene
Semantic Understanding", arXiv:2407.01103.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hfedatm.base.errors import UserError
from hfedatm.base.settings import Settings
from hfedatm.contracts import Method, Rule, Situation, State, StationRule, Wrapper
from hfedatm_core import Combined, MeanAccumulator, Merged, Update
from hfedatm_core.data import Batch, Inputs
from hfedatm_core.merge_report import MergeReport

PREFIX = "fedrc."
Moments = tuple[float, float]
"""Mean of the values and mean of their squares."""


def bhattacharyya(one: Moments, other: Moments) -> float:
    """Return the distance of two Gaussians given by their first two moments."""
    (mean1, square1), (mean2, square2) = one, other
    # Constant inputs have no variance; the floor keeps the logarithm finite.
    var1, var2 = max(square1 - mean1**2, 1e-12), max(square2 - mean2**2, 1e-12)
    total = var1 + var2
    return 0.25 * (mean1 - mean2) ** 2 / total + 0.5 * math.log(
        total / (2 * math.sqrt(var1 * var2))
    )


class InputMoments:
    """Running first two moments of input values."""

    def __init__(self) -> None:
        self._sums, self._count = [0.0, 0.0], 0

    def add(self, inputs: Inputs) -> None:
        """Add the values of one batch."""
        if isinstance(inputs, torch.Tensor):
            values = inputs.double()
        else:
            values = inputs["input_ids"][inputs["attention_mask"].bool()].double()
        self._sums[0] += float(values.sum())
        self._sums[1] += float(values.square().sum())
        self._count += values.numel()

    def result(self) -> Moments:
        """Return the moments of all values added."""
        return self._sums[0] / self._count, self._sums[1] / self._count


class Summarised(Wrapper):
    """A client method that also shares and reports the moments of its inputs."""

    prefix: ClassVar[str] = PREFIX

    def __post_init__(self) -> None:
        """Set the method to share within the station."""
        super().__post_init__()
        if self.inner.sharing == "global":
            raise UserError(
                "server-rule fedrc-weights averages shared arrays within each station, this client "
                "method over all clients: choose another client-method, or for fediir "
                "client-params=level=station"
            )
        self.sharing = "station"  # type: ignore[misc]

    def share(self, model: nn.Module, batches: Iterable[Batch]) -> State:
        """Add the moments to the shared arrays."""
        moments = InputMoments()
        for inputs, _ in batches:
            moments.add(inputs)
        own = {"moments": torch.tensor(moments.result(), dtype=torch.float64)}
        return {**self.inner.share(model, batches), **self.marked(own)}

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        """Start the moments of this training."""
        super().begin(model, shared, memory)
        self._moments = InputMoments()

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Add the batch to the moments; every epoch adds the same values again."""
        self._moments.add(inputs)
        return super().loss(model, inputs, targets)

    def metrics(self) -> dict[str, float]:
        """Report the moments."""
        mean, square = self._moments.result()
        return {**super().metrics(), "input-mean": mean, "input-square": square}


class WeighingStation(StationRule):
    """A station that weighs its clients by the closeness of their data to its own."""

    def weight(self, metrics: Mapping[str, float], shared: State) -> float:
        """Return ``exp(-D)``; the mean divides by the sum."""
        mean, square = shared[PREFIX + "moments"].tolist()
        own = metrics["input-mean"], metrics["input-square"]
        return math.exp(-bhattacharyya(own, (mean, square)))


@dataclass
class FedRCWeights(Rule):
    """Closeness-weighted means at every tier."""

    any_depth: ClassVar[bool] = True
    reports: ClassVar[tuple[str, ...]] = ("input-mean", "input-square")

    def check(self, settings: Settings) -> None:
        """Refuse a training loop that reports no moments, and privacy that this rule would undo."""
        if settings.train_fn:
            raise UserError(
                "server-rule fedrc-weights needs the project's training loop: remove train-fn"
            )
        for key in ("dp_sgd", "secure_aggregation"):
            if getattr(settings, key):
                raise UserError(
                    "server-rule fedrc-weights shows a station the mean and variance of each "
                    f"client's inputs: it cannot be combined with {key.replace('_', '-')}"
                )

    def check_report(self, metrics: Mapping[str, float]) -> None:
        """Refuse moments that no set of values can have."""
        mean, square = metrics["input-mean"], metrics["input-square"]
        if not mean**2 <= square * (1 + 1e-6) + 1e-12:
            raise ValueError(f"no values have mean {mean:g} and mean square {square:g}")

    def on_client(self, method: Method) -> Method:
        """Let clients summarise their data."""
        return Summarised(method)

    def at_station(self) -> StationRule:
        """Weigh the clients."""
        return WeighingStation()

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Average the stations by the closeness of their data to all data."""
        stations = list(updates)
        report = MergeReport("", {u.name: {} for u in stations}, {})
        return Merged(_weighed(stations), report, {})

    def combine(self, updates: Iterable[Update], situation: Situation) -> Combined:
        """Average the stations of a station by the closeness of their data to its own."""
        stations = list(updates)
        examples = round(sum(u.num_examples * u.share for u in stations))
        clients = round(sum(u.num_clients * u.share for u in stations))
        state = _weighed(stations)
        return Combined(Update(state, {}, max(1, examples), num_clients=max(1, clients)))


FedRC = FedRCWeights
"""The old name of the class, for one minor version."""


def _weighed(stations: list[Update]) -> State:
    moments = [(u.metrics["input-mean"], u.metrics["input-square"]) for u in stations]
    everything = _pooled(moments, [u.num_examples for u in stations])
    mean = MeanAccumulator()
    for update, own in zip(stations, moments, strict=True):
        weight = math.exp(-bhattacharyya(own, everything)) * update.share
        mean.add(update.state, weight, update.name)
    return mean.result()


def _pooled(moments: list[Moments], counts: list[int]) -> Moments:
    total = sum(counts)
    means, squares = zip(*moments, strict=True)
    return (
        sum(n * m for n, m in zip(counts, means, strict=True)) / total,
        sum(n * s for n, s in zip(counts, squares, strict=True)) / total,
    )
