"""The updates of one step, stored until all have arrived, and then read within the bounds."""

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
    """Updates that can be read as often as needed, each cut back to multiples of the usual values.

    All updates must be added before the first is read. An update that moves the model in another
    direction than the others is excluded.

    Parameters
    ----------
    start
        The model all updates started from.
    bounds
        The bounds.
    folder
        Folder of the temporary file for updates that do not fit into memory.
    start_of
        Returns the model an update started from, if every update has a start of its own.
    earlier
        The value of `standing` after the previous step, by the names of the updates.
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
        """Return the number of updates that are not excluded."""
        return len(self._inside)

    def __iter__(self) -> Iterator[Update]:
        """Yield the updates, cut back to the bounds, in the order of their arrival."""
        for update, given in zip(self._held.some(self._inside), self.factors, strict=True):
            start = self._start_of(update) if given.moves else self.start
            yield replace(cut(update, given, start), reach=self._reach)
            del update

    # --- for robust rules

    @property
    def left_out(self) -> int:
        """Number of updates that were excluded already."""
        return len(self._outside)

    @property
    def factors(self) -> list[Factors]:
        """The factors that cut back the parts of every update that is not excluded."""
        return [self._factors[place] for place in self._inside]

    def claims(self) -> Tensor:
        """Return the bounded number of examples of every update."""
        counts = [
            self._sizes[place].counts["num-examples"] * given.counts.get("num-examples", 1.0)
            for place, given in zip(self._inside, self.factors, strict=True)
        ]
        return torch.tensor(counts, dtype=torch.float64)

    def records(self) -> Tensor:
        """Return the record of every update; zeros where updates cannot be compared."""
        if not self._comparable:
            return torch.zeros(len(self), dtype=torch.float64)
        return self._records[self._inside]

    def norms(self, name: str) -> Tensor:
        """Return the length of every update's move of a tensor, within the bounds."""
        moves = [
            self._sizes[place].moves.get(name, 0.0) * given.moves.get(name, 1.0)
            for place, given in zip(self._inside, self.factors, strict=True)
        ]
        return torch.tensor(moves, dtype=torch.float64)

    def values(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Yield one tensor of every update as ``updates × coordinates``, a part at a time."""
        return self._blocks(name, self._inside)

    def moves(self, name: str) -> Iterator[Tensor]:
        """Yield the moves of one tensor, in parts like those of `values`, in float64."""
        return self._moves(name, self._inside)

    @property
    def standing(self) -> dict[str, float]:
        """The record of every node after this step, see `hfedatm_core.robust.agreement`."""
        return self._earlier | dict(zip(self._names, self._records.tolist(), strict=False))

    # --- for people

    def cuts(self) -> list[Cut]:
        """Return an entry for every update that was cut back or excluded."""
        found = []
        for place, (name, given) in enumerate(zip(self._names, self._factors, strict=True)):
            if place in self._outside:
                found.append(Cut(name, self._outside[place], 0.0))
            elif entry := explain(name, given):
                found.append(entry)
        return found

    def close(self) -> None:
        """Release all updates."""
        self._held.close()

    # --- computed once, after all updates have been added

    @cached_property
    def _usual(self) -> Sizes | None:
        """The usual sizes, of which the excluded updates are no part."""
        return usual([self._sizes[place] for place in self._inside], self.start)

    @cached_property
    def _factors(self) -> list[Factors]:
        many = len(self._inside) > 2
        return [factors(own, self._usual, self.bounds, many) for own in self._sizes]

    @cached_property
    def _reach(self) -> Reach | None:
        """Bounds on an update's distance from the start; None without bounds or a common start."""
        if self._usual is None or not self.bounds.factor or self._own_starts:
            return None
        limits = {name: self.bounds.factor * move for name, move in self._usual.moves.items()}
        return Reach(self.start, limits)

    @cached_property
    def _inside(self) -> list[int]:
        """Places of the updates that are not excluded."""
        return [place for place in range(len(self._held)) if place not in self._outside]

    @cached_property
    def _outside(self) -> dict[int, str]:
        """Places of the excluded updates, each with the reason; always a minority."""
        count = len(self._held)
        # Networks that were trained apart differ in scale: their updates are only cut back.
        if count < 3 or not self.bounds.agreement or self._own_starts:
            return {}
        far = sorted(self._far, key=lambda place: -self._far[place])
        found = {place: f"{self._far[place]:.3g} times its bounds" for place in far}
        if self._comparable:
            now, usual = self._agreements
            for place in agreement.outsiders(now, usual, self._records):
                why = f"agreement {now[place]:.2f} with the others, usual is {usual:.2f}"
                found.setdefault(place, f"{why}, record {self._records[place]:.2f}")
        return dict(list(found.items())[: (count - 1) // 2])

    @cached_property
    def _far(self) -> dict[int, float]:
        """Places of the updates far beyond their bounds, each with the multiple it reaches."""
        common = usual(self._sizes, self.start)
        excess = [beyond(own, factors(own, common, self.bounds)) for own in self._sizes]
        return {place: times for place, times in enumerate(excess) if times > BEYOND}

    @property
    def _comparable(self) -> bool:
        return len(self._held) > 2 and bool(self.start) and not self._own_starts

    @cached_property
    def _agreements(self) -> tuple[Tensor, float]:
        """The agreement of every update with the others, and the usual agreement."""
        count = len(self._held)
        compared = agreement.peers(count)
        total, tensors = torch.zeros(count, len(compared), dtype=torch.float64), 0
        for name in agreement.telling(self.start):
            lengths = torch.tensor(
                [own.moves.get(name, 0.0) for own in self._sizes], dtype=torch.float64
            )
            if float(lengths.median()) == 0.0:  # at least half of the updates do not move it
                continue
            scale = torch.where(lengths > 0, lengths, 1.0).reciprocal()
            products = torch.zeros_like(total)
            for block in self._moves(name, list(range(count)), cut=False):
                block *= scale[:, None]
                products += block @ block[compared].T
            total += products
            tensors += 1
        cosines = total / max(1, tensors)
        return agreement.agreements(cosines, compared), agreement.usual_agreement(cosines, compared)

    @cached_property
    def _records(self) -> Tensor:
        if not self._comparable:
            return torch.tensor([])
        before = [self._earlier.get(name, 0.0) for name in self._names]
        added = agreement.evidence(*self._agreements, self.bounds.agreement)
        return torch.tensor(before, dtype=torch.float64) + added

    def _moves(self, name: str, places: list[int], cut: bool = True) -> Iterator[Tensor]:
        start = self.start[name].reshape(-1)
        for part, block in self._blocks(name, places, cut):
            yield block.double().sub_(start[part].double())

    def _blocks(
        self, name: str, places: list[int], cut: bool = True
    ) -> Iterator[tuple[slice, Tensor]]:
        start = self.start[name].reshape(-1)
        step = max(1, BLOCK // max(1, len(places)))
        for first in range(0, start.numel(), step):
            part = slice(first, min(first + step, start.numel()))
            rows = []
            for place in places:
                row = self._held.part(place, name, part)
                factor = self._factors[place].moves.get(name, 1.0) if cut else 1.0
                rows.append(row if factor == 1.0 else scale_back(row, start[part], factor))
            yield part, torch.stack(rows)
