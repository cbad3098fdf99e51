"""Merge checkpoints of different width and depth into one of a chosen architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import nn

from hfedatm_core.apart.merging import APART, merge_apart
from hfedatm_core.checkpoints.files import read_shapes
from hfedatm_core.checkpoints.fitting import require_fit
from hfedatm_core.checkpoints.merging import ALL_UNITS, CheckpointReader, require_two
from hfedatm_core.fot.options import AlignmentOptions
from hfedatm_core.inputs import Inputs
from hfedatm_core.merge_report import Merged
from hfedatm_core.merging import merge
from hfedatm_core.resizing import Architecture
from hfedatm_core.resizing.merging import Resized, fits_of, merge_resized
from hfedatm_core.update import Update


def merge_unlike_checkpoints(
    paths: Sequence[Path | str],
    models: Sequence[nn.Module],
    target: nn.Module,
    inputs: Inputs,
    *,
    grams: Sequence[Path | str] = (),
    alpha: float | None = None,
    alignment: AlignmentOptions | None = None,
    on_read: Callable[[str], None] = lambda name: None,
) -> Resized:
    """Bring networks of one family to the target's width and depth, and merge them there.

    Channels are split or joined by unbalanced transport between each network and the one that
    lacks least of the target; Grams are transported along. A network has no vote on blocks that it
    lacks. Files and architectures are checked before the first file is merged.

    Parameters
    ----------
    paths, models
        The checkpoints, and a network of the architecture of each.
    target, inputs
        The architecture of the result (its weights do not matter), and one example input.
    grams
        As in :func:`merge_checkpoints`: with Grams of the checkpoints, channels are matched by
        their outputs and layers merged by RegMean.
    alpha, alignment, on_read
        As in :func:`merge_checkpoints`.

    Returns
    -------
    Resized
        The merged network; its ``back(path)`` is the merged network in the shape of a checkpoint.

    Raises
    ------
    NoFit, ValueError
        An architecture cannot be matched, or a file does not fit its model.
    """
    require_two(paths)
    if len(models) != len(paths):
        raise ValueError(f"there are {len(paths)} checkpoints and {len(models)} models")
    known: dict[int, Architecture] = {}
    architectures = {}
    for path, model in zip(map(str, paths), models, strict=True):
        if id(model) not in known:
            known[id(model)] = Architecture.of(model, inputs, path)
        architectures[path] = known[id(model)]
        require_fit(path, read_shapes(path), architectures[path].shapes)
    goal = Architecture.of(target, inputs, "the target")
    fits = fits_of(goal, architectures)
    reader = CheckpointReader(paths, grams, alpha, bool(grams), on_read)

    def together(updates: Iterator[Update]) -> Merged:
        if grams:
            how = alignment or APART
            return merge_apart(updates, goal.graph, alpha=alpha, alignment=how, keep_grams=True)
        return merge(updates, goal.graph, alignment=alignment or ALL_UNITS)

    def read(path: str) -> Update:
        return reader.update(path, architectures[path].shapes)

    return merge_resized(read, fits, together)
