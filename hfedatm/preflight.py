"""Inspect a run before it starts: the treatment of each layer, the costs, and the errors."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from client_app.data import shares_of
from client_app.ledger import LedgerFile
from client_app.private_release import ClientPrivacy
from hfedatm.base.building import (
    build_method,
    build_model,
    build_rule,
    example_grams,
    frozen_part,
    load_data,
    pick_device,
    trace_channels,
)
from hfedatm.base.building import target_domain as target_of
from hfedatm.base.privacy_settings import clients_asked, gram_mechanism, is_private, statement
from hfedatm.base.records import Task
from hfedatm.base.settings import Settings
from hfedatm.base.tiers import (
    branching,
    is_deep,
    is_inner,
    levels,
    local_rounds,
    rounds_at,
    stations_at,
)
from hfedatm.contracts import Rule
from hfedatm.runtime.opening import check as refuse_mistakes
from hfedatm_core import ChannelGraph, Gram
from hfedatm_core.data import DomainData
from hfedatm_core.grams.by_layer import distinct

FLOAT = 4  # bytes


def examine(settings: Settings) -> dict[str, Any]:
    """Return everything `hfedatm check` shows, as plain data.

    Raises
    ------
    UserError
        For any error that would stop the run before round 1.
    """
    foreseen = refuse_mistakes(settings)
    data = load_data(settings)
    rule, part = build_rule(settings), frozen_part(settings, data.spec)
    model = build_model(settings, data.spec, build_method(settings))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = trace_channels(settings, rule, model, data.spec)
        grams = example_grams(settings, model, data.spec) if rule.needs_grams else {}
    return {
        "tree": "x".join(map(str, branching(settings))),
        "data": _data(settings, data),
        "model": {
            "name": settings.model,
            "parameters": sum(p.numel() for p in model.parameters()),
            "bytes": _state_bytes(model),
            "frozen": part.describe(model) if part else "",
            "layers": layers(model, graph, grams, rule, settings),
        },
        "grams": {
            ", ".join(names): {"width": gram.dim, "bytes": gram_bytes(gram.dim, settings)}
            for names, gram in distinct(grams).items()
        },
        "bytes_up_per_round": bytes_up(model, grams, settings),
        "memory": memory(model, grams, settings),
        "privacy": _privacy(settings, grams),
        "device": _device(settings),
        "warnings": [str(w.message) for w in caught] + foreseen,
    }


def layers(
    model: nn.Module, graph: ChannelGraph, grams: Mapping[str, Gram], rule: Rule, settings: Settings
) -> list[dict[str, str]]:
    """Return for every layer with weights how it is aligned and merged, and the reason."""
    aligns = getattr(rule, "fot", False)
    solves = getattr(rule, "regmean", False)
    groups = {member.tensor: group for group in graph.groups for member in group.producers}
    # The weights of a LayerNorm over channels and pixels have more than one axis.
    follow = {m.tensor for group in graph.groups for m in group.members if m.role == "vector"}
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            continue
        group = groups.get(f"{name}.weight")
        if weight.ndim < 2 or f"{name}.weight" in follow:
            alignment, why_not = "with the layer before", ""
        elif not aligns:
            alignment, why_not = "no", f"server-rule {settings.server_rule} does not align"
        elif group is None:
            alignment, why_not = "frozen", graph.frozen.get(name, "its channels are not understood")
        elif group.kind == "linear" and getattr(rule, "ot_scope", "all") == "conv":
            alignment, why_not = "no", "hidden units are aligned with ot-scope=all"
        else:
            alignment, why_not = "yes", f"{group.size} channels of group {group.name}"
        merging, reason = _merging(name, module, grams, solves, settings)
        found.append(
            {
                "layer": name,
                "type": type(module).__name__,
                "shape": "x".join(map(str, weight.shape)),
                "aligned": alignment,
                "aligned_why": why_not,
                "merged": merging,
                "merged_why": reason,
            }
        )
    return found


def _merging(
    name: str, module: nn.Module, grams: Mapping[str, Gram], solves: bool, settings: Settings
) -> tuple[str, str]:
    if name in grams and solves:
        return "regmean", f"Gram of {grams[name].dim} inputs"
    if not solves:
        return "averaged", f"server-rule {settings.server_rule} has no RegMean"
    if isinstance(module, nn.Conv2d) and not settings.regmean_conv:
        return "averaged", "convolutions are merged by RegMean with regmean-conv=true"
    return "averaged", "has no Gram"


def gram_bytes(width: int, settings: Settings) -> int:
    """Return the bytes of one Gram on the wire: a triangle, or a factor if it is wide."""
    each = FLOAT if settings.gram_dtype == "float32" else 2
    if width <= settings.gram_max_dim:
        return width * (width + 1) // 2 * each
    return width * settings.gram_rank * each + width * FLOAT


def bytes_up(model: nn.Module, grams: Mapping[str, Gram], settings: Settings) -> dict[str, int]:
    """Return the bytes sent up the tree in a round in which every node answers.

    Clients send the model in each of the N station rounds and the Grams in the last; a station
    sends both once. Stations of stations add a product per layer with a Gram, as large as the
    layer's weight. Arrays that a method shares beforehand come on top.
    """
    weights = _state_bytes(model)
    sent = sum(gram_bytes(gram.dim, settings) for gram in distinct(grams).values())
    asked = clients_asked(settings) * settings.stations
    products, stations, models = products_bytes(model, grams, settings), 0, 1
    for level in range(1, levels(settings) + 1):
        extra = products if is_inner(settings, level) else 0
        stations += stations_at(settings, level) * (models * weights + sent + extra)
        models *= rounds_at(settings, level)
    return {
        "clients": asked * (local_rounds(settings) * weights + sent),
        "of_which_grams": asked * sent,
        "stations": stations,
    }


def products_bytes(model: nn.Module, grams: Mapping[str, Gram], settings: Settings) -> int:
    """Return the bytes of the products that a station of stations sends; 0 without such stations.

    A product has a row for each of the layer's outputs, and a column for each input of its Gram.
    """
    if not is_deep(settings) or not build_rule(settings).passes_products:
        return 0
    state = model.state_dict()
    return sum(len(state[f"{name}.weight"]) * gram.dim * FLOAT for name, gram in grams.items())


def memory(model: nn.Module, grams: Mapping[str, Gram], settings: Settings) -> dict[str, int]:
    """Return about how many bytes each node of a tier needs at once, without activations.

    A client holds the model, the received model, gradients and the optimiser's state; a station
    holds a running sum, the model it sent and one reply; the server holds the reference, the sum,
    one update and its aligned copy. Grams are summed dense up to ``gram-max-dim``.
    """
    weights = _state_bytes(model)
    moments = 2 if settings.optimizer == "adamw" else int(settings.momentum > 0)
    widths = [gram.dim for gram in distinct(grams).values()]
    dense = sum(d * min(d, settings.gram_max_dim) * FLOAT for d in widths)
    packed = sum(gram_bytes(d, settings) for d in widths)
    products = products_bytes(model, grams, settings)
    found = {
        "client": (3 + moments) * weights + dense,
        "station": 3 * weights + dense + packed,
        "station of stations": 4 * weights + 2 * dense + packed + 2 * products,
        "server": 4 * weights + 2 * dense + packed + 2 * products,
    }
    if not is_deep(settings):
        del found["station of stations"]
    return found


def _data(settings: Settings, data: DomainData) -> dict[str, Any]:
    target = target_of(settings, data)
    sizes = [sum(map(len, share.values())) for share in shares_of(settings, settings.data_dir)]
    return {
        "dataset": settings.dataset,
        "kind": data.spec.kind,
        "task": settings.task,
        "classes": data.spec.num_classes,
        "domains": {name: len(domain) for name, domain in data.domains.items()},
        "unseen": target,
        "examples_per_client": {"smallest": min(sizes), "largest": max(sizes)},
    }


def _privacy(settings: Settings, grams: Mapping[str, Gram]) -> dict[str, Any]:
    """Return what the run protects and, with noise, the ratio of noise to signal.

    A client's Gram sum over n examples clipped to c has at most the size n c^2; its noise has the
    Frobenius norm sigma c^2 d. The ratio is that of the station's mean over k clients.
    """
    found: dict[str, Any] = {"statement": statement(settings, bool(grams))}
    if not is_private(settings):
        return found
    sizes = [sum(map(len, share.values())) for share in shares_of(settings, settings.data_dir)]
    smallest = min(sizes)
    with tempfile.TemporaryDirectory() as folder:  # a ledger that is not kept
        ledger = LedgerFile(Path(folder))
        task = Task("train", settings, 1, station=0, station_round=1, client=0)
        found["sigma"] = ClientPrivacy(task, smallest, len(distinct(grams)), ledger).sigma
    mechanism = gram_mechanism(settings)
    if mechanism.noised and grams:
        width = max(gram.dim for gram in grams.values())
        signal = mechanism.divisor(smallest)
        ratio = found["sigma"] * width / (signal * clients_asked(settings) ** 0.5)
        found |= {"noise_to_signal": ratio, "feasible": ratio < 1}
    return found


def _device(settings: Settings) -> dict[str, Any]:
    device = pick_device(settings)
    if device.type != "cuda":
        return {"name": str(device)}
    about = torch.cuda.get_device_properties(device)
    return {"name": f"{device} ({about.name})", "bytes": about.total_memory}


def _state_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())
