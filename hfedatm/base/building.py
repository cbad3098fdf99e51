"""From settings to objects: the data set, the network, the client method.

Every tier calls these with the same settings and so gets the same network.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn

import hfedatm_core.data
import hfedatm_core.models
import hfedatm_core.robust.rules
from hfedatm.base.errors import UserError
from hfedatm.base.plugins import calling, check_call, construct, find_class, find_function
from hfedatm.base.seeding import derive, seed_torch
from hfedatm.base.settings import Settings, parse_params
from hfedatm.base.trust.policy import Policy
from hfedatm.contracts import Method, Rule
from hfedatm_core import Gram, collect_grams, forward
from hfedatm_core.data import DataSpec, DomainData
from hfedatm_core.discovery import check_options
from hfedatm_core.robust.rules.base import RobustRule

# Built-in methods and rules are plug-ins of the tiers above: they are found by name, like others.
BUILT_IN_METHODS, BUILT_IN_RULES = "client_app.methods", "server_app.rules"


def load_data(settings: Settings, data_dir: str | None = None) -> DomainData:
    """Load the data set; a process that serves many clients loads it once.

    ``data_dir`` is the folder to read, whatever the settings say; an empty one is none.
    """
    folder = Policy.current().data.folder or settings.data_dir if data_dir is None else data_dir
    return _load(settings.dataset, settings.dataset_params, folder)


@lru_cache(maxsize=2)
def _load(dataset: str, params: str, data_dir: str) -> DomainData:
    load = find_dataset(dataset)
    check_call("dataset", load, "load(data_dir, **params) -> DomainData", "data_dir")
    options = parse_params(params)
    _check_options("dataset", load, options, f"data set {dataset!r}", "data_dir")
    with calling("dataset", dataset):
        data: Any = load(data_dir or None, **options)
    if not isinstance(data, DomainData):
        raise UserError(f"dataset: {dataset!r} returned {type(data).__name__}, not a DomainData")
    return data


def find_dataset(name: str) -> Callable[..., Any]:
    """Return the function that loads a data set."""
    found: Callable[..., Any] = find_function(
        "dataset", name, hfedatm_core.data, "load", "hfedatm.datasets"
    )
    return found


def target_domain(settings: Settings, data: DomainData) -> str:
    """Return the name of the held-out domain as the data set spells it."""
    try:
        return data.key(settings.target_domain)
    except ValueError as error:
        raise UserError(f"target-domain: {error}") from None


def build_rule(settings: Settings) -> Rule:
    """Make the server rule."""
    package = import_module(BUILT_IN_RULES)
    cls = find_class("server-rule", settings.server_rule, package, Rule, "hfedatm.rules")
    rule: Rule = construct("rule-params", cls, parse_params(settings.rule_params))
    rule.check(settings)
    return rule


def build_robust(settings: Settings, tier: Literal["clients", "stations"]) -> RobustRule:
    """Make the robust rule that stands before the mean of a tier's updates."""
    key = f"robust-{tier}"
    name = settings.robust_clients if tier == "clients" else settings.robust_stations
    cls = find_class(key, name, hfedatm_core.robust.rules, RobustRule, "hfedatm.robust")
    rule: RobustRule = construct(key, cls, {"liars": settings.robust_liars})
    return rule


def build_method(settings: Settings) -> Method:
    """Make the client method, with what the server rule adds to it."""
    package = import_module(BUILT_IN_METHODS)
    cls = find_class("client-method", settings.client_method, package, Method, "hfedatm.methods")
    method: Method = construct("client-params", cls, parse_params(settings.client_params))
    return build_rule(settings).on_client(method)


def build_model(
    settings: Settings, spec: DataSpec, method: Method, station: int | None = None
) -> nn.Module:
    """Make the network the method trains, with the same initial weights on every tier.

    With a ``station`` they are that station's own.
    """
    build = _builder(settings.model, settings.model_params)
    with torch.random.fork_rng(devices=[]):
        own = () if station is None else ("station", station)
        seed_torch(derive(settings.seed, "model", *own))
        with calling("model", settings.model):
            model: Any = build(spec)
        if not isinstance(model, nn.Module):
            raise UserError(
                f"model: {settings.model!r} returned {type(model).__name__}, not a Module"
            )
        if settings.fix_model:
            from hfedatm_core.privacy.dpsgd import fix_model  # late: Opacus is slow to import

            model = fix_model(model)
        with calling("client-method", settings.client_method):
            return method.adapt(model)


@cache
def _builder(name: str, params: str) -> Callable[[DataSpec], Any]:
    """Return a model's build function with the user's options."""
    build = find_function("model", name, hfedatm_core.models, "build", "hfedatm.models")
    check_call("model", build, "build(spec, **params) -> torch.nn.Module", "spec")
    options = parse_params(params)
    _check_options("model", build, options, f"model {name!r}", "spec")
    return partial(build, **options)


def _check_options(
    setting: str, function: Callable[..., Any], options: dict[str, Any], owner: str, given: str
) -> None:
    try:
        check_options(function, options, owner, reserved=(given,))
    except ValueError as error:
        raise UserError(f"{setting}-params: {error}") from None


def try_model(settings: Settings, model: nn.Module, spec: DataSpec) -> None:
    """Refuse a model that does not turn examples of the data into one score per class."""
    example = spec.example()
    with calling("model", settings.model), torch.no_grad():
        scores: Any = forward(model.eval(), example)
    model.train()
    shape = tuple(getattr(scores, "shape", ()))
    if shape != (2, spec.num_classes):
        raise UserError(
            f"model: {settings.model!r} turns 2 examples into a {type(scores).__name__} of shape "
            f"{shape}; needed is a Tensor of shape {(2, spec.num_classes)}: one score per class"
        )


def example_grams(settings: Settings, model: nn.Module, spec: DataSpec) -> dict[str, Gram]:
    """Return Grams of two made-up examples: which layers have one, how wide, which share one."""
    return collect_grams(
        model,
        [(spec.example(), None)],
        max_dim=settings.gram_max_dim,
        rank=settings.gram_rank,
        conv=settings.regmean_conv,
        bias=settings.regmean_bias == "exact",
    )


def pick_device(settings: Settings) -> torch.device:
    """Return the device to compute on; ``auto`` takes a GPU when there is one."""
    if settings.device != "auto":
        device = torch.device(settings.device)
        if not _is_there(device):
            raise UserError(f"device: this machine has no {device}; 'auto' takes what there is")
        return device
    return _best_device()


@cache  # a process that serves many clients asks for each of them
def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _is_there(device: torch.device) -> bool:
    if device.type == "cuda":
        return (device.index or 0) < torch.cuda.device_count()
    return device.type == "cpu" or torch.backends.mps.is_available()
