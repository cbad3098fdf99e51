"""Updates that are needed more than once, in a memory that does not grow with their number.

The usual values are known only after all updates have arrived, so the updates must be stored until
then. The first few stay in memory; the others go to one temporary file without a name, so that
nothing is left behind however the process ends. The file holds raw numbers, one update after the
other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.grams.gram import FactorGram, Gram, PackedGram
from hfedatm_core.profiles import Profiles
from hfedatm_core.update import Update

MEMORY = 32_000_000
"""Bytes of updates that stay in memory."""

_ALIGN = 64  # bytes; torch views a buffer as a tensor only at an aligned offset


@dataclass(frozen=True)
class _Place:
    """The place of one tensor within the bytes of its update."""

    start: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Filed:
    """An update whose tensors are in the file."""

    rest: Update
    offset: int
    size: int
    places: Mapping[str, _Place]
    grams: tuple[tuple[tuple[str, ...], type[Gram], int, int], ...]
    """Layers, form, rows and rank of every distinct Gram; its tensors are in ``places``."""


class HeldUpdates:
    """Updates in the order of their arrival, to be read as often as needed.

    Parameters
    ----------
    folder
        Folder of the temporary file; by default the system's folder for temporary files.
    memory
        Bytes of updates kept in memory; `MEMORY` unless given.
    """

    def __init__(self, folder: str | Path | None = None, memory: int | None = None) -> None:
        self._folder, self._memory = folder, MEMORY if memory is None else memory
        self._entries: list[Update | _Filed] = []
        self._file: BinaryIO | None = None
        self._end = 0
        self._table: dict[str, _Place] = {}

    def __len__(self) -> int:
        """Return the number of updates."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Update]:
        """Yield the updates in the order of their arrival."""
        return self.some(range(len(self)))

    def some(self, places: Iterable[int]) -> Iterator[Update]:
        """Yield the updates at these places."""
        for place in places:
            entry = self._entries[place]
            yield self._read(entry) if isinstance(entry, _Filed) else entry

    def add(self, update: Update) -> None:
        """Keep one more update."""
        parts, grams = _parts(update)
        size = sum(tensor.nbytes for tensor in parts.values())
        if size <= self._memory:
            self._memory -= size
            self._entries.append(update)
            return
        offset, places = 0, dict[str, _Place]()
        for key, tensor in parts.items():
            places[key] = _Place(offset, tensor.dtype, tensor.shape)
            offset += -(-tensor.nbytes // _ALIGN) * _ALIGN
        if places == self._table:  # the usual case: all updates share one table
            places = self._table
        self._table = places
        self._write(parts, places)
        rest = replace(update, state={}, grams={}, profiles=None)
        self._entries.append(_Filed(rest, self._end, offset, places, grams))
        self._end += offset

    def part(self, place: int, name: str, values: slice) -> Tensor:
        """Return some of the values of one flattened tensor of one update."""
        entry = self._entries[place]
        if isinstance(entry, Update):
            return entry.state[name].detach().reshape(-1)[values]
        kept = entry.places["state/" + name]
        width = kept.dtype.itemsize
        first, size = values.start * width, (values.stop - values.start) * width
        return self._bytes(entry.offset + kept.start + first, size).view(kept.dtype)

    def close(self) -> None:
        """Release the updates in memory and the temporary file."""
        self._entries.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, entry: _Filed) -> Update:
        data = self._bytes(entry.offset, entry.size)
        tensors = {
            key: data[place.start : place.start + place.size].view(place.dtype).view(place.shape)
            for key, place in entry.places.items()
        }
        state = {
            key.removeprefix("state/"): tensor
            for key, tensor in tensors.items()
            if key.startswith("state/")
        }
        grams: dict[str, Gram] = {}
        for number, (layers, form, rows, rank) in enumerate(entry.grams):
            part = f"gram/{number}/"
            gram: Gram = (
                PackedGram(tensors[part + "triangle"], rows)
                if form is PackedGram
                else FactorGram(tensors[part + "factor"], tensors[part + "diagonal"], rows, rank)
            )
            grams |= dict.fromkeys(layers, gram)
        means = {
            key.removeprefix("profile/"): tensor
            for key, tensor in tensors.items()
            if key.startswith("profile/")
        }
        counts = tensors.get("profiled")
        profiles = None if counts is None else Profiles(means, counts)
        return replace(entry.rest, state=state, grams=grams, profiles=profiles)

    def _write(self, parts: Mapping[str, Tensor], places: Mapping[str, _Place]) -> None:
        if self._file is None:
            if self._folder is not None:
                Path(self._folder).mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115
        for key, tensor in parts.items():
            data = _as_bytes(tensor).numpy().data
            at = self._end + places[key].start
            while data:
                written = os.pwrite(self._file.fileno(), data, at)
                data, at = data[written:], at + written

    def _bytes(self, offset: int, size: int) -> Tensor:
        assert self._file is not None
        data = torch.empty(size, dtype=torch.uint8)
        view, done = data.numpy().data, 0
        while done < size:
            # The padding behind the last tensor of the file was never written.
            count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if count == 0:
                break
            done += count
        return data


def _parts(
    update: Update,
) -> tuple[dict[str, Tensor], tuple[tuple[tuple[str, ...], type[Gram], int, int], ...]]:
    """Return all tensors of an update by key, and the layers, form, rows and rank of its Grams."""
    parts = {f"state/{name}": tensor.detach() for name, tensor in update.state.items()}
    if update.profiles is not None:
        parts |= {f"profile/{name}": mean for name, mean in update.profiles.means.items()}
        parts["profiled"] = update.profiles.counts
    described = []
    for number, (layers, gram) in enumerate(distinct(update.grams).items()):
        rank = 0
        if isinstance(gram, PackedGram):
            parts[f"gram/{number}/triangle"] = gram.triangle
        elif isinstance(gram, FactorGram):
            parts |= {
                f"gram/{number}/factor": gram.factor,
                f"gram/{number}/diagonal": gram.diagonal(),
            }
            rank = gram.rank
        else:
            raise TypeError(f"a Gram of type {type(gram).__name__} cannot be kept")
        described.append((layers, type(gram), gram.rows, rank))
    return parts, tuple(described)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
