"""``hfedatm audit``: attack the Grams a client would send, without and with the configured DP."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfedatm.base.errors import UserError
from hfedatm.base.privacy_settings import gram_mechanism
from hfedatm.cli.arguments import Assignments, ConfigFile
from hfedatm.cli.run import read_settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hfedatm.base.settings import Settings
    from hfedatm.base.trained_part import FrozenPart
    from hfedatm_core.privacy.audit import AuditResult

MAX_ROWS = 256
"""Most rows; the search over rotations takes quadratic memory and cubic time in the rows."""


def audit(
    assignments: Assignments = None,
    model: Annotated[str, typer.Option(help="Short for model=NAME.")] = "",
    data: Annotated[str, typer.Option(help="Short for dataset=NAME.")] = "",
    rows: Annotated[int, typer.Option(min=1, help="Examples the Gram is made of.")] = 16,
    layer: Annotated[str, typer.Option(help="Attack this layer only.")] = "",
    weights: Annotated[
        Path | None,
        typer.Option(help="Model of a run (last.safetensors) instead of one trained here."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the cosines to this file.")] = None,
    config: ConfigFile = None,
) -> None:
    """Reconstruct a client's activations from the Gram it would send.

    For example:

      hfedatm audit --model lenet5 --data digits --rows 16

      hfedatm audit privacy.mechanism=example privacy.epsilon=1 --rows 8 --plot audit.png
    """
    from hfedatm.base.resolving import resolve

    given = read_settings(config, assignments or [])
    given |= {key: value for key, value in (("model", model), ("dataset", data)) if value}
    settings = resolve(given)
    findings = attack(settings, rows, layer, weights)
    show(findings, settings)
    if plot:
        draw(findings, plot)
        typer.echo(f"plot: {plot}")


@dataclass(frozen=True)
class Finding:
    """The result of the attack on one layer, without and with DP, or why it was not attacked."""

    width: int
    rows: int
    without: AuditResult | None = None
    private: AuditResult | None = None
    skipped: str = ""


def attack(
    settings: Settings, rows: int, layer: str = "", weights: Path | None = None
) -> dict[str, Finding]:
    """Attack the Grams of the first client's first ``rows`` examples, layer by layer."""
    import torch

    from client_app.data import client_data
    from hfedatm.base.batches import Batches
    from hfedatm.base.building import build_method, build_model, frozen_part
    from hfedatm_core import FactorGram, collect_grams
    from hfedatm_core.privacy.audit import audit as reconstruct

    own = client_data(settings, 0, {})
    if rows > len(own.train):
        raise UserError(f"--rows: client 0 has {len(own.train)} examples, not {rows}")
    model = build_model(settings, own.spec, build_method(settings))
    cpu = torch.device("cpu")
    if weights:
        _load(model, weights, frozen_part(settings, own.spec))
    else:
        _train(model, Batches(own.train, own.spec, settings.batch_size, cpu, 0), settings)
    batch = next(iter(Batches(own.train.subset(torch.arange(rows)), own.spec, rows, cpu)))
    truth = _inputs(model, batch)
    if layer and layer not in truth:
        raise UserError(f"--layer: no Linear layer {layer!r}; there are: {', '.join(truth)}")
    clip = gram_mechanism(settings).example_clip
    options: dict[str, Any] = {"max_dim": settings.gram_max_dim, "rank": settings.gram_rank}
    plain = collect_grams(model, [batch], **options)
    noised = _released(settings, collect_grams(model, [batch], clip=clip, **options), rows, own)
    findings = {}
    for name, true_rows in truth.items():
        if layer not in ("", name):
            continue
        gram, count = plain[name], len(true_rows)
        if isinstance(gram, FactorGram) or count > MAX_ROWS:
            why = "sends a low-rank factor" if count <= MAX_ROWS else f"more than {MAX_ROWS} rows"
            findings[name] = Finding(gram.dim, count, skipped=f"not attacked: {why}")
            continue
        without, private = (
            reconstruct(g[name].dense(), count, true_rows) if g else None for g in (plain, noised)
        )
        findings[name] = Finding(gram.dim, count, without, private)
    return findings


def show(findings: Mapping[str, Finding], settings: Settings) -> None:
    """Print a table and its meaning."""
    from rich.console import Console
    from rich.table import Table

    from hfedatm_core.privacy.audit import RECOVERED_COSINE

    table = Table("layer", "inputs", "rows", "recovered without DP", "recovered with DP")
    for name, finding in findings.items():
        cells = [finding.skipped or _cell(finding.without), _cell(finding.private)]
        table.add_row(name, str(finding.width), str(finding.rows), *cells)
    console = Console()
    console.print(table)
    console.print(
        f"A row counts as recovered when a reconstructed one has a cosine above "
        f"{RECOVERED_COSINE} with it.",
        highlight=False,
    )
    if not gram_mechanism(settings).noised:
        console.print("No DP is configured: set privacy.mechanism and privacy.epsilon.")
    elif settings.secure_aggregation:
        console.print("With secure aggregation a station sees only sums, not this client's Gram.")


def draw(findings: Mapping[str, Finding], path: Path) -> None:
    """Draw the cosine of every true row with its reconstruction, best first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from hfedatm_core.privacy.audit import RECOVERED_COSINE

    attacked = {n: f for n, f in findings.items() if f.without and f.without.attacked}
    if not attacked:
        raise UserError("--plot: no layer was attacked, so there is nothing to draw")
    figure, axes = plt.subplots(
        1, len(attacked), figsize=(3 * len(attacked), 3), sharey=True, squeeze=False
    )
    for panel, (name, finding) in zip(axes[0], attacked.items(), strict=True):
        for label, result in (("without DP", finding.without), ("with DP", finding.private)):
            if result:
                panel.plot(sorted(result.cosines, reverse=True), "o-", ms=3, label=label)
        panel.axhline(RECOVERED_COSINE, color="0.5", lw=0.8, ls="--")
        panel.set(title=name, xlabel="row, best first", ylim=(0, 1.02))
    axes[0][0].set_ylabel("cosine with the truth")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _cell(result: AuditResult | None) -> str:
    if result is None:
        return "-"
    if not result.attacked:
        return "inputs of both signs: not attacked"
    trivial = f" ({result.without_search} without a search)" if result.without_search else ""
    return f"{result.recovered} of {result.of}{trivial}"


def _train(model: nn.Module, batches: Any, settings: Settings) -> None:
    import torch

    from client_app.methods.fedavg import FedAvg
    from client_app.training import train_locally

    torch.manual_seed(settings.seed)
    train_locally(model, FedAvg(), batches, settings, settings.lr)


def _load(model: nn.Module, path: Path, part: FrozenPart | None) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(path)
        model.load_state_dict(part.without(state, path) if part else state)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"--weights: {path} does not fit this model: {error}") from error


def _inputs(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return the true input rows of every Linear layer."""
    import torch
    from torch import nn

    from hfedatm_core import forward

    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[name] = args[0].detach().reshape(-1, args[0].shape[-1]).clone()

        return note

    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    handles = [m.register_forward_pre_hook(hook(n)) for n, m in linear.items()]
    model.eval()
    with torch.no_grad():
        forward(model, batch[0])
    for handle in handles:
        handle.remove()
    return seen


def _released(settings: Settings, grams: Any, rows: int, own: Any) -> Any:
    """Return the noised Grams that a client would send in a whole run; None without DP."""
    if not gram_mechanism(settings).noised:
        return None
    from client_app.ledger import LedgerFile
    from client_app.private_release import ClientPrivacy
    from hfedatm.base.records import Task
    from hfedatm_core.grams.by_layer import distinct

    alone = settings.model_copy(update={"secure_aggregation": False})
    task = Task("train", alone, 1, client=0, send_grams=True)
    with tempfile.TemporaryDirectory() as folder:
        privacy = ClientPrivacy(
            task, len(own.train), len(distinct(grams)), LedgerFile(Path(folder))
        )
        return privacy.release(grams, rows, 1)
