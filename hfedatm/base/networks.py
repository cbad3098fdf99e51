"""Build a network from settings, and the part of it that is not trained."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, get_type_hints

import torch
from torch import nn

import hfedatm_core.models
from hfedatm.base.errors import UserError
from hfedatm.base.options import parse_params, parse_texts
from hfedatm.base.plugins import calling, check_call, construct, find_function
from hfedatm.base.seeding import derive, seed_torch
from hfedatm.base.settings import Settings
from hfedatm.base.trained_part import FrozenPart
from hfedatm_core.adapters import LoraOptions, add_adapters, is_lora
from hfedatm_core.data import DataSpec
from hfedatm_core.discovery import check_options


@lru_cache(maxsize=4)
def frozen_part_of(settings: Settings, spec: DataSpec) -> FrozenPart:
    """Return the part of the network that is not trained on these examples."""
    part = FrozenPart(initial_network(settings, spec), settings.train_only, spec)
    if part.hides and (settings.station_start == "own" or settings.gram_layers == "all"):
        key = "station-start=own" if settings.station_start == "own" else "gram-layers=all"
        raise UserError(
            f"train-only: {settings.train_only!r} leaves frozen weights behind trained ones, so "
            f"channels cannot be moved, as {key} needs: train the end of the model, or change {key}"
        )
    return part


def initial_network(settings: Settings, spec: DataSpec) -> nn.Module:
    """Return the whole network with the run's initial weights."""
    with torch.random.fork_rng(devices=[]):
        seed_torch(derive(settings.seed, "model"))
        return build_network(settings, spec)


def build_network(settings: Settings, spec: DataSpec) -> nn.Module:
    """Build the network, with fresh weights from torch's random generator."""
    build = _builder(settings.model, settings.model_params)
    with calling("model", settings.model):
        model: Any = build(spec)
    if not isinstance(model, nn.Module):
        raise UserError(f"model: {settings.model!r} returned {type(model).__name__}, not a Module")
    if is_lora(settings.train_only):
        try:
            add_adapters(model, _lora_options(settings.lora_params))
        except (ValueError, ModuleNotFoundError) as error:
            raise UserError(f"lora-params: {error}") from None
    return model


def _lora_options(params: str) -> LoraOptions:
    options: LoraOptions = construct("lora-params", LoraOptions, parse_params(params))
    return options


@cache
def _builder(name: str, params: str) -> Callable[[DataSpec], Any]:
    """Return a model's build function with the user's options."""
    build = find_function("model", name, hfedatm_core.models, "build", "hfedatm.models")
    check_call("model", build, "build(spec, **params) -> torch.nn.Module", "spec")
    options = options_for("model", build, params, f"model {name!r}", "spec")
    return partial(build, **options)


def options_for(
    setting: str, function: Callable[..., Any], params: str, owner: str, given: str
) -> dict[str, Any]:
    """Return the user's parameters of a function; one that it does not have is refused.

    A parameter that the function declares as text gets the text, even if that is a number.
    """
    texts = parse_texts(params)
    try:
        check_options(function, texts, owner, reserved=(given,))
    except ValueError as error:
        raise UserError(f"{setting}-params: {error}") from None
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # a type that only a type checker imports: nothing is known
        hints = {}
    as_text = {name: text for name, text in texts.items() if hints.get(name) in (str, str | None)}
    return parse_params(params) | as_text
