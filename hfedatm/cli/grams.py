"""``hfedatm grams``: measure the inputs of a checkpoint's layers, for a merge by RegMean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfedatm.base.errors import UserError
from hfedatm.cli.networks import Model, Shape, measured_on, mistakes, open_like


def grams(
    checkpoint: Annotated[Path, typer.Argument(help="File: .safetensors, or .pt with weights.")],
    model: Model,
    data: Annotated[
        str,
        typer.Option(
            help="A folder of images without labels, or package.module:function that yields inputs."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: the checkpoint's name + .grams.")
    ] = None,
    input: Shape = "",
    linear: Annotated[
        bool, typer.Option("--linear", help="Measure Linear layers alone: a smaller file.")
    ] = False,
) -> None:
    """Measure the Grams of a checkpoint's layers on data like its training data.

    A Gram reveals its data: if it was measured on few examples, they can be recovered. Give the
    file only to people to whom you would give the data.

    For example:

      hfedatm grams a.safetensors --model torchvision:resnet18 --data images/

      hfedatm grams a.pt --model nets:build --data nets:batches --out a.grams
    """
    from rich.progress import track

    from hfedatm_core import collect_grams, grams_nbytes
    from hfedatm_core.checkpoints import load_checkpoint, write_grams

    target = out or checkpoint.with_name(f"{checkpoint.stem}.grams")
    with mistakes():
        network = open_like(model, input, checkpoint)
        load_checkpoint(network.model, checkpoint)
        batches = measured_on("--data", data, network)
        shown = track(batches, "measuring", transient=True)
        found = collect_grams(network.model, shown, full=not linear)
        if not found:
            raise UserError(f"--model: {model} has no layer to measure")
        write_grams(target, found, checkpoint)
    rows = min(gram.rows for gram in found.values())
    typer.echo(f"{target}: {len(found)} layers, {rows} rows, {grams_nbytes(found) / 1e6:.1f} MB")
    if rows < 64:
        typer.echo(f"note: Grams of {rows} rows are inaccurate, and reveal the examples", err=True)
