"""``hfedatm export``: write a run's model for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hfedatm.cli.arguments import OneRun


def export(
    run: OneRun = None,
    model: Annotated[
        Literal["best", "last"],
        typer.Option(help="The round with the best source-validation accuracy, or the last one."),
    ] = "best",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to write; default: export in the run."),
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write model.onnx.")] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Code to import though the run is somebody else's: package.module:name; repeat it."
        ),
    ] = None,
) -> None:
    """Write the model as safetensors with a model card, and as ONNX if asked.

    For example:

      hfedatm export

      hfedatm export results/demo --onnx

      hfedatm export demo --model last -o my-model
    """
    from hfedatm.exporting import export_run
    from hfedatm.runs import newest_run, read_run

    found = read_run(run or newest_run())
    for path in export_run(found, model, output or found.path / "export", onnx, allow or []):
        typer.echo(str(path))
