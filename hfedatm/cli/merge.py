"""``hfedatm merge``: align and merge checkpoint files."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from hfedatm.base.errors import UserError
from hfedatm.cli.arguments import AsJson
from hfedatm.cli.merge_unlike import check_models, merge_into, open_unlike
from hfedatm.cli.networks import Shape, measured_on, mistakes, open_like
from hfedatm.cli.refining import data_to_refine, refined

if TYPE_CHECKING:
    from hfedatm_core import Merged
    from hfedatm_core.checkpoints import Network


def merge(
    checkpoints: Annotated[
        list[Path], typer.Argument(help="Two or more files: .safetensors, or .pt with weights.")
    ],
    model: Annotated[
        list[str],
        typer.Option(
            help="torchvision:NAME, timm:NAME, transformers:FOLDER or package.module:function; "
            "with --target once per checkpoint, if they differ."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write: .safetensors or .pt.")],
    grams: Annotated[
        list[Path] | None,
        typer.Option(help="A file that 'hfedatm grams' wrote; repeat it per checkpoint."),
    ] = None,
    refine: Annotated[
        list[str] | None,
        typer.Option(
            help="With --grams: fit each layer to the inputs that it gets, on images like those of "
            "the checkpoints: a folder, or package.module:function; once, or once per checkpoint."
        ),
    ] = None,
    recalibrate: Annotated[
        str,
        typer.Option(
            help="Measure BatchNorm again on images: a folder, or package.module:function."
        ),
    ] = "",
    input: Shape = "",
    shared_start: Annotated[
        bool,
        typer.Option(
            "--shared-start", help="They were fine-tuned from one network: match by filters."
        ),
    ] = False,
    reference: Annotated[
        Literal["first", "medoid"],
        typer.Option(
            help="Whose order the others get: the first's, or that of the one nearest to all."
        ),
    ] = "first",
    scope: Annotated[
        Literal["all", "conv"],
        typer.Option(help="Align all hidden units, or only the channels of convolutions."),
    ] = "all",
    target: Annotated[
        str,
        typer.Option(
            help="Architecture of the result, written like --model, if checkpoints differ in "
            "width or depth."
        ),
    ] = "",
    back: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the merged network in the shape of every checkpoint; with --target."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Align checkpoints and merge them into one.

    Files are read as tensors, never as pickled objects. Without Grams, channels are matched by
    their filters and averaged. With Grams they are matched by what they compute, layers are merged
    by RegMean, and BatchNorm gets statistics that fit. With images, too, --refine corrects what
    remains.

    For example:

      hfedatm merge a.safetensors b.safetensors c.pt --model torchvision:resnet18 --out merged.pt

      hfedatm merge a.pt b.pt --model nets:build --grams a.grams --grams b.grams --out merged.pt

      hfedatm merge a.pt b.pt --model nets:f --grams a.grams --grams b.grams --refine x/ --out m.pt

      hfedatm merge a.pt b.pt --model nets:small --model nets:large --target nets:large --out m.pt
    """
    from hfedatm_core import AlignmentOptions
    from hfedatm_core.checkpoints import merge_checkpoints, write_state
    from hfedatm_core.merge_table import layer_rows

    check_models(model, checkpoints, target, back, shared_start or reference != "first")
    if out.resolve() in {path.resolve() for path in checkpoints}:
        raise UserError(f"--out: {out} is one of the checkpoints; name another file")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out: there is no folder {out.absolute().parent}")
    apart = bool(grams) and not shared_start
    if apart and reference != "first":
        raise UserError(
            "--reference: with --grams channels are matched to the mean of all; leave it"
        )
    options: dict[str, Any] = {} if apart else {"reference": reference}
    with mistakes(), _table_alone():
        network = open_like(model[0], input, checkpoints[0])
        networks = [network]
        if target:
            networks, network = open_unlike(model, target, input, checkpoints)
        data = data_to_refine(refine or (), checkpoints, network, apart and not target)
        images = measured_on("--recalibrate", recalibrate, network) if recalibrate else None
        with _progress(len(checkpoints), reference, as_json) as on_read:
            how = AlignmentOptions("exact" if apart else "sinkhorn", scope)
            if target:
                merged, others = merge_into(
                    checkpoints,
                    networks,
                    network,
                    back,
                    grams=grams or (),
                    on_read=on_read,
                    alignment=how,
                )
            else:
                others = []
                merged = merge_checkpoints(
                    checkpoints,
                    network.model,
                    network.example,
                    grams=grams or (),
                    on_read=on_read,
                    shared_start=shared_start,
                    alignment=how,
                    **options,
                )
        notes = others + _left_undone(merged, network, bool(grams), bool(recalibrate))
        state = refined(merged, checkpoints, network, data, as_json) if data else merged.state
        if images is not None:
            from hfedatm_core.batch_norm import measure_again

            network.model.load_state_dict(state)
            measure_again(network.model, images)
            measured = network.model.state_dict()
            state = {name: measured[name].to(value.dtype) for name, value in state.items()}
        write_state(out, state, {"merged from": ", ".join(path.name for path in checkpoints)})
    rows = layer_rows(merged)
    if as_json:
        found = {"layers": [asdict(row) for row in rows], "notes": notes, "out": str(out)}
        typer.echo(json.dumps(found, indent=2))
    else:
        _show(rows, notes, out, bool(grams))


@contextmanager
def _table_alone() -> Iterator[None]:
    """Silence the log about layers: the table says why each was not aligned, or averaged."""
    logger = logging.getLogger("hfedatm_core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "layer .* is averaged")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _progress(files: int, reference: str, quiet: bool) -> Iterator[Any]:
    """Show which checkpoint is read; the medoid compares all pairs before it merges."""
    total = files if reference == "first" else files + files * (files + 1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("reading", total=total)

        def on_read(name: str) -> None:
            bar.update(task, advance=1, description=escape(Path(name).name))

        yield on_read


def _left_undone(merged: Merged, network: Network, grams: bool, recalibrated: bool) -> list[str]:
    """Return notes on what the merge could not do, and the option that would let it."""
    from torch import nn

    notes = []
    if not grams:
        notes.append(
            "No Grams were given: layers are averaged, not merged by RegMean. 'hfedatm grams' "
            "measures them; give its files with --grams."
        )
    if not merged.graph.groups:
        notes.append(
            "Nothing was aligned: " + "; ".join(f"{n}: {r}" for n, r in merged.graph.frozen.items())
        )
    norms = [m for m in network.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    lone = list(merged.report.lone_norms) if merged.report.quality else norms
    if lone and not recalibrated:
        notes.append(
            f"The statistics of {len(lone)} BatchNorm layers were averaged. Of checkpoints that "
            "were trained apart that is seldom right: measure them again with --recalibrate."
        )
    return notes


def _show(rows: list[Any], notes: list[str], out: Path, grams: bool) -> None:
    console = Console(highlight=False)
    table = Table(
        *("layer", "shape", "aligned", "merged", "before", "after", "why"),
        box=None,
        header_style="dim",
        caption="before, after: distance of a channel to the reference's; 0 is the same",
        caption_justify="left",
    )
    for row in rows:
        aligned = f"{row.moved} moved" if row.aligned else "no"
        costs = (f"{row.before:.3f}", f"{row.after:.3f}") if row.aligned else ("", "")
        shape = "x".join(map(str, row.shape))
        # Without Grams one note explains for all layers why they were averaged.
        why = "; ".join(filter(None, (row.frozen, row.averaged if grams else "")))
        table.add_row(escape(row.layer), shape, aligned, row.how, *costs, escape(why))
    console.print(table)
    for note in notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    console.print(f"written: {escape(str(out))}")
