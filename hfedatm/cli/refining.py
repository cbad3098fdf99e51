"""The option ``--refine`` of ``hfedatm merge``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hfedatm.base.errors import UserError
from hfedatm.cli.networks import measured_on

if TYPE_CHECKING:
    from torch import Tensor

    from hfedatm_core import Batch, Merged
    from hfedatm_core.checkpoints import Network


def data_to_refine(
    given: Sequence[str], checkpoints: Sequence[Path], network: Network, apart: bool
) -> list[Iterable[Batch]]:
    """Return the data of every checkpoint; one value of the option is for all of them."""
    if not given:
        return []
    if not apart:
        raise UserError(
            "--refine: it corrects a merge by Grams: give --grams, and leave --shared-start and "
            "--target"
        )
    if len(given) not in (1, len(checkpoints)):
        raise UserError(
            f"--refine: give it once, or once per checkpoint in their order: {len(checkpoints)} "
            f"times, not {len(given)}"
        )
    named = list(given) * (len(checkpoints) if len(given) == 1 else 1)
    return [measured_on("--refine", one, network) for one in named]


def refined(
    merged: Merged,
    checkpoints: Sequence[Path],
    network: Network,
    data: Sequence[Iterable[Batch]],
    quiet: bool,
) -> dict[str, Tensor]:
    """Return the merged network with its layers fitted to their inputs; show which is fitted."""
    from hfedatm_core.checkpoints import refine_checkpoints

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("refining", total=None)

        def on_layer(name: str, layers: int) -> None:
            bar.update(task, advance=1, total=layers, description=f"refining {escape(name)}")

        return refine_checkpoints(merged, checkpoints, network.model, data, on_layer)
