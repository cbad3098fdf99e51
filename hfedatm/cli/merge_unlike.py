"""``hfedatm merge --target``: checkpoints of different width and depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfedatm.base.errors import UserError
from hfedatm.cli.networks import open_like, parse_shape, source_of

if TYPE_CHECKING:
    from hfedatm_core import Merged
    from hfedatm_core.checkpoints import Network


def check_models(
    models: Sequence[str],
    checkpoints: Sequence[Path],
    target: str,
    back: Path | None,
    like_alike: bool,
) -> None:
    """Refuse options that do not belong together."""
    if not target:
        if len(models) > 1:
            raise UserError("--model: given several times; name the result's with --target")
        if back is not None:
            raise UserError("--back: needs --target; without it all have the result's shape")
        return
    if len(models) not in (1, len(checkpoints)):
        raise UserError(
            f"--model: given {len(models)} times for {len(checkpoints)} checkpoints; give it once, "
            "or once per checkpoint in their order"
        )
    if like_alike:
        raise UserError(
            "--target: checkpoints of different shapes are matched to the one that lacks least of "
            "the target; leave --shared-start and --reference"
        )
    if back is not None and not back.is_dir():
        raise UserError(f"--back: there is no folder {back}")


def open_unlike(
    models: Sequence[str], target: str, shape: str, checkpoints: Sequence[Path]
) -> tuple[list[Network], Network]:
    """Return the network of every checkpoint, and the target's, with their number of classes."""
    from hfedatm_core import forward
    from hfedatm_core.checkpoints import open_network

    named = list(models) * len(checkpoints) if len(models) == 1 else list(models)
    known: dict[str, Network] = {}
    for model, path in zip(named, checkpoints, strict=True):
        if model not in known:
            known[model] = open_like(model, shape, path)
    first = known[named[0]]
    outputs = forward(first.model.eval(), first.example)
    classes = int(outputs.shape[-1]) if outputs.ndim == 2 else None
    goal = open_network(source_of(target, "--target"), parse_shape(shape), classes=classes)
    return [known[model] for model in named], goal


def merge_into(
    checkpoints: Sequence[Path],
    networks: Sequence[Network],
    target: Network,
    back: Path | None,
    **options: Any,
) -> tuple[Merged, list[str]]:
    """Merge into the target's shape; write the networks that go back; return notes for people."""
    from hfedatm_core.checkpoints import merge_unlike_checkpoints, write_state
    from hfedatm_core.resizing.depth import blocks

    models = [network.model for network in networks]
    resized = merge_unlike_checkpoints(checkpoints, models, target.model, target.example, **options)
    notes = []
    for path in checkpoints:
        fit = resized.fits[str(path)]
        changed = sum(ours != theirs for ours, theirs in fit.sizes.values())
        parts = [f"{changed} of {len(fit.sizes)} channel groups have another width"] * bool(changed)
        if fit.absent:
            parts.append(f"it has no vote on {', '.join(fit.lacks)}, which it lacks")
        if fit.extra:
            gone = ", ".join(blocks(fit.extra, set(fit.station.shapes)))
            parts.append(f"the target has no place for its {gone}: they are left out")
        if parts:
            notes.append(f"{path.name}: {'; '.join(parts)}.")
        if back is not None:
            write_state(back / path.name, resized.back(str(path)), {"merged from": path.name})
    return resized.merged, notes
