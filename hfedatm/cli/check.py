"""``hfedatm check``: check everything that can be known before a run."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hfedatm.cli.arguments import AsJson, Assignments, ConfigFile
from hfedatm.cli.run import read_settings


def check(
    assignments: Assignments = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Check settings, plug-ins, data, model, privacy and device before a run.

    Shows which layers will be aligned, merged by RegMean, averaged or left alone, and why; Gram
    sizes; bytes per round and memory per tier. Exit code: 0 when the run can start, 1 when it can
    but its privacy noise would drown the Grams, 2 when something is wrong.

    For example:

      hfedatm check

      hfedatm check preset=pacs-resnet18 data-dir=~/data

      hfedatm check --config my.yaml --json
    """
    from hfedatm.base.resolving import resolve
    from hfedatm.preflight import examine

    found = examine(resolve(read_settings(config, assignments or [])))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _show(found)
    raise typer.Exit(0 if found["privacy"].get("feasible", True) else 1)


def _show(found: dict[str, Any]) -> None:
    from server_app.narration import size

    console = Console(highlight=False)
    data, model, sent = found["data"], found["model"], found["bytes_up_per_round"]
    domains = ", ".join(f"{name} ({count})" for name, count in data["domains"].items())
    each = data["examples_per_client"]
    facts = Table.grid(padding=(0, 2))
    learned = f"{data['classes']} classes"
    if data["task"] != "classification":
        learned = f"{data['task']}, {data['classes']} outputs"
    facts.add_row("tree", f"{found['tree']}: children of the server, of its stations, and so on")
    facts.add_row("data", f"{data['dataset']}: {learned}; domains {domains}")
    facts.add_row(
        "",
        f"{data['unseen']} is never seen; {each['smallest']} to {each['largest']} "
        "examples per client",
    )
    facts.add_row(
        "model", f"{model['name']}: {model['parameters']:,} parameters, {size(model['bytes'])}"
    )
    if model["frozen"]:
        facts.add_row("", model["frozen"])
    facts.add_row(
        "bytes up per round",
        f"clients {size(sent['clients'])} (Grams: {size(sent['of_which_grams'])}), "
        f"stations {size(sent['stations'])}",
    )
    tiers = ", ".join(f"{tier} {size(count)}" for tier, count in found["memory"].items())
    facts.add_row("memory, about", f"{tiers}; activations come on top")
    facts.add_row("privacy", _privacy(found["privacy"]))
    facts.add_row("device", found["device"]["name"])
    console.print(facts)
    table = Table("layer", "shape", "aligned", "merged", "why", box=None, header_style="dim")
    for layer in model["layers"]:
        why = "; ".join(filter(None, (layer["aligned_why"], layer["merged_why"])))
        table.add_row(layer["layer"], layer["shape"], layer["aligned"], layer["merged"], why)
    console.print(table)
    if found["grams"]:
        table = Table("Gram of", "width", "bytes", box=None, header_style="dim")
        for names, gram in found["grams"].items():
            table.add_row(names, str(gram["width"]), size(gram["bytes"]))
        console.print(table)
    for warning in found["warnings"]:
        console.print(f"[yellow]warning:[/] {warning}")


def _privacy(privacy: dict[str, Any]) -> str:
    text = str(privacy["statement"])
    if "sigma" in privacy:
        text = text.rstrip(".") + f"; noise multiplier {privacy['sigma']:.3g}"
    if "noise_to_signal" in privacy:
        verdict = "usable" if privacy["feasible"] else "the Grams drown in it"
        text += f"; noise is {privacy['noise_to_signal']:.2g} times the signal: {verdict}"
    return text
