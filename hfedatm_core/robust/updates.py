"""The updates of one step, held until all are there, and read within the bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from hfedatm_core.robust import agreement
from hfedatm_core.robust.bounding import (
    BEYOND,
    Bounds,
    Cut,
    Factors,
    Sizes,
    beyond,
    cut,
    explain,
    factors,
    measure,
    scale_back,
    usual,
)
from hfedatm_core.robust.held import HeldUpdates
from hfedatm_core.tensors import State
from hfedatm_core.update import Reach, Update

BLOCK = 2**21
"""Numbers that `BoundedUpdates.values` returns at a time."""


class BoundedUpdates:
    """Updates that can be read as often as needed, each cut back to what is usual among them.

    All are added before the first is read. Whoever points elsewhere than the others is left out.

    Parameters
    ----------
    start
        The model all updates started from.
    bounds
        The bounds.
    folder
        Where updates wait that do not fit into memory.
    start_of
        The model one update started from, where each has its own.
    earlier
        What `standing` was after the step before, by the names of the updates.
    """

    def __init__(
        self,
        start: State,
        bounds: Bounds,
        folder: str | Path | None = None,
        start_of: Callable[[Update], State] | None = None,
        earlier: Mapping[str, float] | None = None,
    ) -> None:
        self.start, self.bounds = start, bounds
        self._earlier = dict(earlier or {})
        self._own_starts = start_of is not None
        self._start_of = start_of or (lambda _: self.start)
        self._held = HeldUpdates(folder)
        self._sizes: list[Sizes] = []
        self._names: list[str] = []

    def add(self, update: Update) -> None:
        """Measure and hold one update."""
        self._sizes.append(measure(update, self._start_of(update)))
        self._names.append(update.name)
        self._held.add(update)

    def __len__(self) -> int:
        """Return the number of updates that are not left out."""
        return len(self._inside)

    def __iter__(self) -> Iterator[Update]:
        """Yield the updates within the bounds, in the order of their arrival."""
        for update, given in zip(self._held.some(self._inside), self.factors, strict=True):
            start = self._start_of(update) if given.moves else self.start
            yield replace(cut(update, given, start), reach=self._reach)
            del update

    # --- what robust rules look at

    @property
    def left_out(self) -> int:
        """Number of updates that were left out already."""
        return len(self._outside)

    @property
    def factors(self) -> list[Factors]:
        """What the parts of every update are multiplied by."""
        return [self._factors[place] for place in self._inside]

    def claims(self) -> Tensor:
        """Return the number of examples every update counts for."""
        counts = [
            self._sizes[place].counts["num-examples"] * given.counts.get("num-examples", 1.0)
            for place, given in zip(self._inside, self.factors, strict=True)
        ]
        return torch.tensor(counts, dtype=torch.float64)

    def norms(self, name: str) -> Tensor:
        """Return how far every update moves a tensor."""
        moves = [
            self._sizes[place].moves[name] * given.moves.get(name, 1.0)
            for place, given in zip(self._inside, self.factors, strict=True)
        ]
        return torch.tensor(moves, dtype=torch.float64)

    def values(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Yield one tensor of every update as ``updates × coordinates``, a part at a time."""
        return self._blocks(name, self._inside)

    def moves(self, name: str) -> Iterator[Tensor]:
        """Yield one tensor's moves likewise, in float64."""
        return self._moves(name, self._inside)

    @property
    def standing(self) -> dict[str, float]:
        """How much every update agrees with the others, now and before; for the next step."""
        now = dict(zip(self._names, self._agreements.tolist(), strict=False))
        return {**self._earlier, **now}

    # --- what people look at

    def cuts(self) -> list[Cut]:
        """Return what was cut, an entry per update that lost anything."""
        found = []
        for place, (name, given) in enumerate(zip(self._names, self._factors, strict=True)):
            if place in self._outside:
                found.append(Cut(name, self._outside[place], 0.0))
            elif entry := explain(name, given):
                found.append(entry)
        return found

    def close(self) -> None:
        """Let go of all updates."""
        self._held.close()

    # --- computed once all are there

    @cached_property
    def _usual(self) -> Sizes | None:
        return usual(self._sizes, self.start)

    @cached_property
    def _factors(self) -> list[Factors]:
        many = len(self._sizes) > 2
        return [factors(own, self._usual, self.bounds, many) for own in self._sizes]

    @cached_property
    def _reach(self) -> Reach | None:
        """How far an update may lie from the start; None without bounds or without one start."""
        if self._usual is None or not self.bounds.factor or self._own_starts:
            return None
        limits = {name: self.bounds.factor * move for name, move in self._usual.moves.items()}
        return Reach(self.start, limits)

    @cached_property
    def _inside(self) -> list[int]:
        """Places of the updates that are not left out."""
        return [place for place in range(len(self._held)) if place not in self._outside]

    @cached_property
    def _outside(self) -> dict[int, str]:
        """Places of the updates that are left out, and why; always a minority."""
        count = len(self._held)
        # Networks that were trained apart differ in scale; theirs are cut back, and nobody is out.
        if count < 3 or not self.bounds.agreement or self._own_starts:
            return {}
        excess = [beyond(own, given) for own, given in zip(self._sizes, self._factors, strict=True)]
        far = sorted((p for p in range(count) if excess[p] > BEYOND), key=lambda p: -excess[p])
        found = {place: f"{excess[place]:.3g} times its bounds" for place in far}
        if self._comparable:
            usual = float(self._agreements.median())
            for place in agreement.outsiders(self._agreements, self.bounds.agreement):
                why = (
                    f"agreement {self._agreements[place]:.2f} with the others, usual is {usual:.2f}"
                )
                found.setdefault(place, why)
        return dict(list(found.items())[: (count - 1) // 2])

    @property
    def _comparable(self) -> bool:
        return len(self._held) > 2 and bool(self.start) and not self._own_starts

    @cached_property
    def _agreements(self) -> Tensor:
        """Every update's agreement: half of it now, half what it was before."""
        count = len(self._held)
        if not self._comparable:
            return torch.tensor([])
        compared = agreement.peers(count)
        total, tensors = torch.zeros(count, len(compared), dtype=torch.float64), 0
        for name in agreement.telling(self.start):
            moves = [
                own.moves[name] * given.moves.get(name, 1.0)
                for own, given in zip(self._sizes, self._factors, strict=True)
            ]
            lengths = torch.tensor(moves, dtype=torch.float64)
            if float(lengths.median()) == 0.0:  # hardly anybody moves it
                continue
            scale = torch.where(lengths > 0, lengths, 1.0).reciprocal()
            products = torch.zeros_like(total)
            for block in self._moves(name, list(range(count))):
                block *= scale[:, None]
                products += block @ block[compared].T
            total += products
            tensors += 1
        now = agreement.agreements(total / max(1, tensors), compared)
        before = [
            self._earlier.get(name, float(a)) for name, a in zip(self._names, now, strict=True)
        ]
        return (now + torch.tensor(before, dtype=torch.float64)) / 2

    def _moves(self, name: str, places: list[int]) -> Iterator[Tensor]:
        start = self.start[name].reshape(-1)
        for part, block in self._blocks(name, places):
            yield block.double().sub_(start[part].double())

    def _blocks(self, name: str, places: list[int]) -> Iterator[tuple[slice, Tensor]]:
        start = self.start[name].reshape(-1)
        step = max(1, BLOCK // max(1, len(places)))
        for first in range(0, start.numel(), step):
            part = slice(first, min(first + step, start.numel()))
            rows = []
            for place in places:
                row = self._held.part(place, name, part)
                factor = self._factors[place].moves.get(name, 1.0)
                rows.append(row if factor == 1.0 else scale_back(row, start[part], factor))
            yield part, torch.stack(rows)
