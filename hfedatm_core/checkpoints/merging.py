"""Merge checkpoints that are files, two of them in memory at a time, whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hfedatm_core.apart.merging import APART, merge_apart
from hfedatm_core.apart.refining import OwnedNetwork, refine
from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.checkpoints.files import Shapes, fingerprint, read_grams, read_shapes
from hfedatm_core.checkpoints.fitting import read_fitting, require_fit, shapes_of
from hfedatm_core.fot.options import AlignmentOptions
from hfedatm_core.inputs import Batch, Inputs
from hfedatm_core.merge_report import Merged
from hfedatm_core.merging import merge
from hfedatm_core.profiles import Profiles
from hfedatm_core.update import Update

ALL_UNITS = AlignmentOptions(scope="all")


def merge_checkpoints(
    paths: Sequence[Path | str],
    model: nn.Module,
    inputs: Inputs,
    *,
    grams: Sequence[Path | str] = (),
    profiles: Sequence[Profiles] = (),
    shared_start: bool = False,
    alpha: float | None = None,
    alignment: AlignmentOptions | None = None,
    on_read: Callable[[str], None] = lambda name: None,
    **options: Any,
) -> Merged:
    """Align the networks in these files and merge them.

    All files are checked before the first is merged. Then only the running mean, the reference and
    one other checkpoint are in memory at a time.

    Parameters
    ----------
    paths
        Checkpoints of one architecture; see :func:`read_state`. The first is the reference.
    model, inputs
        The architecture (its weights do not matter) and one example input.
    grams
        Files that :func:`write_grams` wrote, in any order: each names its checkpoint. With them
        channels are matched by their outputs, layers with a Gram of every checkpoint are merged by
        RegMean and repaired, and BatchNorm gets statistics that fit: see :func:`merge_apart`.
    profiles
        Class profiles of every checkpoint, in the order of ``paths`` (:func:`collect_profiles`);
        only with ``grams``. Channels are then matched by their profiles, too.
    shared_start
        The checkpoints were fine-tuned from one network: merge as :func:`merge` does, by filters,
        with neither repair nor new statistics.
    alpha
        Off-diagonal entries of Grams are multiplied by it: by default as :func:`merge_apart` trusts
        them, or 0.75 for a shared start.
    alignment
        Options of the alignment; by default hidden units are aligned, too, with Grams by the exact
        assignment.
    on_read
        Called with the name of every checkpoint that is read.
    options
        Passed to :func:`merge` or :func:`merge_apart`.

    Raises
    ------
    ValueError
        A file does not fit: another architecture, another number of classes, missing tensors;
        Grams belong to none of the checkpoints; or there are profiles of some checkpoints only.
    """
    require_two(paths)
    apart = bool(grams) and not shared_start
    if profiles and (not grams or shared_start or len(profiles) != len(paths)):
        raise ValueError(
            f"profiles need Grams of networks that were trained apart, and one for each of the "
            f"{len(paths)} checkpoints; there are {len(profiles)}"
        )
    wanted = shapes_of(model.state_dict())
    for path in paths:
        require_fit(path, read_shapes(path), wanted)
    reader = CheckpointReader(paths, grams, alpha, apart, on_read)
    graph = ChannelGraph.trace(model, inputs)
    by_path = dict(zip(map(str, paths), profiles, strict=False))

    def updates() -> Iterator[Update]:
        for path in map(str, paths):
            # without a name, so that it is freed before the next is read
            yield reader.update(path, wanted, by_path.get(path))

    if apart:
        return merge_apart(updates, graph, alpha=alpha, alignment=alignment or APART, **options)
    return merge(updates, graph, alignment=alignment or ALL_UNITS, **options)


def refine_checkpoints(
    merged: Merged,
    paths: Sequence[Path | str],
    model: nn.Module,
    data: Sequence[Iterable[Batch]],
    on_layer: Callable[[str, int], None] = lambda name, layers: None,
) -> dict[str, Tensor]:
    """Return a merge of :func:`merge_checkpoints` by Grams with its layers fitted to their inputs.

    See :func:`refine`. One checkpoint is in memory at a time.

    Parameters
    ----------
    merged, paths, model
        The merge, and what was merged.
    data
        Batches like the data of every checkpoint, in the order of ``paths``; each is read once per
        layer.
    on_layer
        As in :func:`refine`.
    """
    wanted = shapes_of(model.state_dict())
    parts = {
        str(path): OwnedNetwork(partial(read_fitting, path, wanted), batches)
        for path, batches in zip(paths, data, strict=True)
    }
    return refine(merged, model, parts, on_layer=on_layer)


def require_two(paths: Sequence[Path | str]) -> None:
    """Refuse a single file, and one that is named twice."""
    if len({Path(path).expanduser().resolve() for path in paths}) < max(2, len(paths)):
        raise ValueError("name at least two different checkpoints")


class CheckpointReader:
    """Reads checkpoints with their Grams, one at a time.

    Parameters
    ----------
    paths, grams, alpha, on_read
        As in :func:`merge_checkpoints`.
    apart
        Whether :func:`merge_apart` gets the Grams: it shrinks them itself, after matching.
    """

    def __init__(
        self,
        paths: Sequence[Path | str],
        grams: Sequence[Path | str],
        alpha: float | None,
        apart: bool,
        on_read: Callable[[str], None],
    ) -> None:
        self._measured = _grams_by_checkpoint(paths, grams)
        self._share = 1.0 if apart else 0.75 if alpha is None else alpha
        self._on_read = on_read

    def update(self, path: str, wanted: Shapes, profiles: Profiles | None = None) -> Update:
        """Return the network in a file, whose tensors must have these shapes."""
        self._on_read(path)
        own = read_grams(self._measured[path])[0] if path in self._measured else {}
        if self._share != 1.0:
            shrunk = {id(gram): gram.shrink(self._share) for gram in own.values()}
            own = {name: shrunk[id(gram)] for name, gram in own.items()}
        return Update(read_fitting(path, wanted), own, name=path, profiles=profiles)


def _grams_by_checkpoint(
    paths: Sequence[Path | str], grams: Sequence[Path | str]
) -> dict[str, Path | str]:
    """Return, by checkpoint, the file with its Grams, for the checkpoints that have one."""
    if not grams:
        return {}
    owners = {fingerprint(path): str(path) for path in paths}
    found: dict[str, Path | str] = {}
    for file in grams:
        owner = owners.get(read_grams(file)[1])
        if owner is None:
            raise ValueError(
                f"the Grams in {file} were measured for none of these checkpoints as they are now; "
                "measure them again with 'hfedatm grams'"
            )
        found[owner] = file
    return found
