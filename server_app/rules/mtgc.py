"""MTGC (Fang et al., 2024): gradient corrections at every tier of the tree.

A client's step follows ``g + z_i + y_e`` instead of its gradient ``g``:

    z_i += (x_i - x_e) / (H lr)        after a station round; zero at the start of a global round
    y_e += (x_e - x)   / (H N lr)      after a global round; kept

with the client's model ``x_i``, the station's ``x_e`` and the global ``x``, ``H`` local steps and
``N`` station rounds. A client computes its ``z_i`` from its own last model and the station model it
receives next; a station computes its ``y_e`` likewise from the global model. The only extra
model-sized array that travels is ``y_e``, from a station to its clients.

In a tree of more levels every station has a correction, and a client's step follows the sum of
``z_i`` and of the corrections on its way to the server. A correction compares a node with its
parent: it takes a step after every round of the parent, divided by the distance that the parent's
children went in that round, and is zero again when the parent starts from a new model. The server
never does, so only the corrections of its own children are kept. Every station passes the sum of
the corrections above on, with its own.

The formulas leave three things open:

- *Weights.* Means here are weighted by the number of examples ``n``, so the corrections cancel in
  the same weights: ``sum_i n_i z_i = 0`` in a station and ``sum_e n_e y_e = 0`` over the children
  of one parent, when all take part. With equal shares these are the plain sums.
- *Steps.* Clients with different numbers of batches take different numbers of steps. The
  corrections cancel only if all clients divide by one common number: the weighted mean, which
  travels with the model.
- *Momentum.* ``H lr`` is how far ``H`` plain steps go along a constant unit gradient. With momentum
  ``m`` that distance is ``lr sum_{t<=H} (1 - m^t) / (1 - m)``, and it takes the place of ``H lr``.

Fang et al., "Hierarchical Federated Learning with Multi-Timescale Gradient Correction",
arXiv:2409.18448.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hfedatm.base.errors import UserError
from hfedatm.base.records import Task
from hfedatm.base.schedule import learning_rate
from hfedatm.base.settings import Settings
from hfedatm.contracts import Method, Rule, Situation, State, StationRule, Wrapper, snapshot
from hfedatm_core import Merged, Update, merge

PREFIX = "mtgc."


def distance(lr: float, momentum: float, steps: float) -> float:
    """Return how far SGD moves in so many steps along a constant gradient of length one."""
    m = momentum
    return float(lr * (steps - m * (1 - m**steps) / (1 - m)) / (1 - m))


class Corrected(Wrapper):
    """A client method whose gradients are corrected."""

    prefix: ClassVar[str] = PREFIX

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        """Bring ``z`` up to date with the station model that has just arrived."""
        super().begin(model, shared, memory)
        sent, kept = self.own(shared), self.own(memory)
        self._model, self._steps, self._moment = model, 0, sent["moment"]
        received = snapshot(model)
        self._z = {name: torch.zeros_like(p) for name, p in received.items()}
        *job, station_round = self._moment.tolist()
        *last_job, last_round = kept["moment"].tolist() if kept else (0, 0, 0)
        if last_job == job:
            self._z = {name: kept[f"z.{name}"].to(p.device) for name, p in received.items()}
        if (last_job, last_round) == (job, station_round - 1):
            for name, p in received.items():
                step = (kept[f"x.{name}"].to(p.device) - p) / sent["distance"].item()
                self._z[name] = self._z[name] + step
        self._sum = {
            name: z + sent[f"y.{name}"].to(z.device) if f"y.{name}" in sent else z
            for name, z in self._z.items()
        }

    def correct(self, model: nn.Module) -> None:
        """Add ``z + y`` to the gradient."""
        super().correct(model)
        for name, p in model.named_parameters():
            if p.grad is not None:
                p.grad += self._sum[name]
        self._steps += 1

    def remember(self) -> State:
        """Keep ``z`` and the trained model, from which the next ``z`` is made."""
        own = {"moment": self._moment}
        own |= {f"z.{name}": z for name, z in self._z.items()}
        own |= {f"x.{name}": p for name, p in snapshot(self._model).items()}
        return {**super().remember(), **self.marked(own)}

    def metrics(self) -> dict[str, float]:
        """Report the number of steps."""
        return {**super().metrics(), "steps": self._steps}


class Correcting(StationRule):
    """What stations of all levels do: keep ``y``, and pass the sum of all corrections on.

    A parent gives its children ``since``, the moment when it started from the model that it has
    been training since; ``moment`` and ``path``, the last round of the children and how far they
    went in it; and ``y.*``, the sum of the corrections above them.
    """

    _model: State
    """The station's model of the last round."""

    def begin(self, task: Task, received: State, broadcast: State, memory: State) -> None:
        """Bring ``y`` up to date with the parent's model that has just arrived."""
        self._task, self._path = task, 0.0
        self._job = torch.tensor([task.round, task.station_round])
        self._since = broadcast["since"] if broadcast else torch.zeros(2, dtype=torch.int64)
        self._above = {n: y for n, y in broadcast.items() if n.startswith("y.")}
        self._y: State = {}
        if memory and torch.equal(memory["since"], self._since):
            self._y = {n: y for n, y in memory.items() if n.startswith("y.")}
            if "moment" in broadcast and torch.equal(memory["moment"], broadcast["moment"]):
                for name, x in received.items():
                    if x.is_floating_point():
                        step = (memory[f"x.{name}"] - x) / broadcast["path"].item()
                        before = self._y.get(f"y.{name}")
                        self._y[f"y.{name}"] = step if before is None else before + step

    def corrections(self) -> State:
        """Return the sum of this station's correction and of those above it."""
        own, above = self._y, self._above
        return {n: own[n] + above[n] if n in above else own[n] for n in own} | {
            n: y for n, y in above.items() if n not in own
        }

    def metrics(self) -> dict[str, float]:
        """Report the distance of the whole job."""
        return {"path": self._path}

    def remember(self) -> State:
        """Keep ``y`` and the station model, from which the next ``y`` is made."""
        kept = {f"x.{n}": x for n, x in self._model.items() if x.is_floating_point()}
        return {**kept, **self._y, "since": self._since, "moment": self._job}


class CorrectingStation(Correcting):
    """A station with clients."""

    def begin(self, task: Task, received: State, broadcast: State, memory: State) -> None:
        """Start without a distance: nobody has trained yet."""
        super().begin(task, received, broadcast, memory)
        self._distance = 0.0

    def shared(self, station_round: int) -> State:
        """Send the corrections, and the distance by which ``z`` is divided."""
        arrays = {
            "moment": torch.tensor([*self._job.tolist(), station_round]),
            "distance": torch.tensor(self._distance, dtype=torch.float64),
            **self.corrections(),
        }
        return {PREFIX + name: array for name, array in arrays.items()}

    def after(self, station_round: int, model: State, metrics: Mapping[str, float]) -> None:
        """Note how far the clients went on average."""
        s = self._task.settings
        lr = learning_rate(s, self._task.round, station_round)
        self._distance = distance(lr, s.momentum, metrics["steps"])
        self._path += self._distance
        self._model = model


class CorrectingInnerStation(Correcting):
    """A station of stations."""

    def begin(self, task: Task, received: State, broadcast: State, memory: State) -> None:
        """Start without a round of the children."""
        super().begin(task, received, broadcast, memory)
        self._last: State = {}

    def shared(self, station_round: int) -> State:
        """Send the corrections, and the mean path by which the children divide."""
        return {**self.corrections(), "since": self._job, **self._last}

    def after(self, station_round: int, model: State, metrics: Mapping[str, float]) -> None:
        """Note how far the children went on average."""
        self._path += metrics["path"]
        self._last = _round_of((self._task.round, station_round), metrics["path"])
        self._model = model


def _round_of(moment: tuple[int, int], path: float) -> State:
    return {"moment": torch.tensor(moment), "path": torch.tensor(path, dtype=torch.float64)}


@dataclass
class MTGC(Rule):
    """The example-weighted mean of models that were trained with corrections."""

    reports: ClassVar[tuple[str, ...]] = ("steps",)
    station_reports: ClassVar[tuple[str, ...]] = ("path",)
    any_depth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Start without a mean path: nothing has been merged yet."""
        self._memory: dict[str, Tensor] = {}

    def check(self, settings: Settings) -> None:
        """Refuse settings for which the corrections are not defined."""
        if settings.optimizer != "sgd":
            raise UserError(
                f"server-rule mtgc corrects the gradients of SGD steps; optimizer is "
                f"{settings.optimizer!r}: set optimizer=sgd"
            )
        for key in ("train_fn", "dp_sgd"):
            if getattr(settings, key):
                key = key.replace("_", "-")
                raise UserError(f"server-rule mtgc needs the plain training loop: remove {key}")

    def check_report(self, metrics: Mapping[str, float]) -> None:
        """Refuse reported steps and paths by which a correction cannot be divided."""
        for name in ("steps", "path"):
            if name in metrics and not 1e-12 <= metrics[name] <= 1e9:
                raise ValueError(f"{name} = {metrics[name]:g} is no distance that SGD can go")

    def on_client(self, method: Method) -> Method:
        """Correct the method's gradients."""
        return Corrected(method)

    def at_station(self) -> StationRule:
        """Keep ``y`` at the station."""
        return CorrectingStation()

    def at_inner_station(self) -> StationRule:
        """Keep ``y`` at the station, and tell its stations their mean path."""
        return CorrectingInnerStation()

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Average, and note the mean path by which the stations divide."""
        weighed: list[tuple[int, float]] = []

        def noted() -> Iterator[Update]:
            for update in updates:
                weighed.append((update.num_examples, update.metrics["path"]))
                yield update
                del update

        merged = merge(noted(), fot=False, regmean=False)
        path = sum(n * path for n, path in weighed) / sum(n for n, _ in weighed)
        since = torch.zeros(2, dtype=torch.int64)
        self._memory = {"since": since, **_round_of((situation.round, 0), path)}
        return merged

    def shared(self) -> State:
        """Tell the stations the mean path."""
        return self._memory

    def remember(self) -> State:
        """Keep the mean path."""
        return self._memory

    def restore(self, memory: State) -> None:
        """Restore the mean path."""
        self._memory = memory
