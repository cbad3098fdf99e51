"""Export a run's model: safetensors, a model card, ONNX."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import nn

from hfedatm.base.building import build_method, build_rule, load_data, whole_model
from hfedatm.base.errors import UserError
from hfedatm.base.privacy_settings import statement
from hfedatm.base.resolving import validate
from hfedatm.base.settings import Settings, SettingsError
from hfedatm.base.tensor_files import load_weights, read_tensors
from hfedatm.base.trained_part import ActivationSpec
from hfedatm.base.trust import authorship
from hfedatm.runs import Run, measure_of
from hfedatm_core.data import DataSpec
from hfedatm_files import replacing
from server_app.scores import summarise


def export_run(
    run: Run, which: str, folder: Path, onnx: bool = False, allow: Iterable[str] = ()
) -> list[Path]:
    """Write the chosen model and the files needed to use it; return their paths.

    Everything is checked and built before the first file is written. Plug-in code that another
    author's folder names is imported only if ``allow`` names it, too.
    """
    weights = run.path / f"{which}.safetensors"
    if not weights.is_file():
        if which == "best" and (run.path / "last.safetensors").is_file():
            raise UserError(
                f"{run.name} has no best model, because it never evaluated on source data "
                "(validation-fraction); export the last one with --model last"
            )
        raise UserError(f"{run.name} has no {weights.name}: no round is finished yet")
    if run.rounds and all(record.kept for record in run.rounds):
        raise UserError(
            f"{run.name} has nothing to export: no round changed the model; round 1: "
            f"{run.rounds[0].kept}"
        )
    if onnx:
        require_onnx()
    settings = _settings(run)
    authorship.require_own(run.config, settings, allow, "--allow {name}")
    spec = load_data(settings).spec
    model = whole_model(settings, spec, build_method(settings))
    spec = spec.before if isinstance(spec, ActivationSpec) else spec
    load_weights(model, read_tensors(weights)[0], weights)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "model.safetensors", folder / "README.md", folder / "settings.json"]
    shutil.copyfile(weights, files[0])
    files[1].write_text(model_card(run, settings, spec, which), encoding="utf-8")
    files[2].write_text(json.dumps(run.settings, indent=2) + "\n", encoding="utf-8")
    if onnx:
        files.append(folder / "model.onnx")
        write_onnx(model, spec, files[-1])
    return files


def model_card(run: Run, settings: Settings, spec: DataSpec, which: str) -> str:
    """Return the model card: description, accuracy, training, how to load it, and caveats."""
    cards = Environment(
        loader=PackageLoader("hfedatm", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, not HTML
    )
    outcome = summarise(run.rounds)
    return cards.get_template("model-card.md.j2").render(
        run=run,
        settings=settings,
        spec=spec,
        scores=(outcome["best_by_source"] if which == "best" else None) or outcome["last"],
        which=which,
        measure=measure_of([run]),
        sources=sorted({re.sub(r"[^\w .:+-]", "_", domain) for domain in run.domains}),
        privacy=statement(settings, build_rule(settings).needs_grams),
    )


def require_onnx() -> None:
    """Raise an error that says what to install if ONNX files cannot be written here."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UserError(f"--onnx needs {' and '.join(missing)}; pip install 'hfedatm[onnx]'")


def write_onnx(model: nn.Module, spec: DataSpec, path: Path) -> None:
    """Write the model in evaluation mode, for any batch size."""
    import torch

    inputs: Any = spec.example()
    named = inputs if isinstance(inputs, dict) else {spec.kind: inputs}
    try:
        program = torch.onnx.export(
            model.eval().cpu(),
            tuple(named.values()),
            input_names=list(named),
            output_names=["logits"],
            dynamic_shapes=[{0: torch.export.Dim("batch")} for _ in named],
            dynamo=True,
            verbose=False,
        )
        assert program is not None, "dynamo=True returns a program"
        with replacing(path) as part:
            program.save(str(part))
    except Exception as error:  # the exporter's errors are of many kinds
        raise UserError(f"--onnx: {type(model).__name__} cannot be exported: {error}") from error


def _settings(run: Run) -> Settings:
    try:
        return validate(run.settings)
    except SettingsError as error:
        raise UserError(
            f"{run.path / 'config.json'}: written by another version of hfedatm? {error}"
        ) from None
