"""Build objects from settings: the data set, the network, the client method, the rules.

Every tier calls these with the same settings and so gets the same network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn

import hfedatm_core.data
import hfedatm_core.metrics
import hfedatm_core.models
import hfedatm_core.robust.rules
from hfedatm.base.errors import UserError
from hfedatm.base.learning import build_task, find_task, require_classes
from hfedatm.base.networks import build_network, frozen_part_of, initial_network, options_for
from hfedatm.base.options import parse_params
from hfedatm.base.plugins import calling, check_call, construct, find_class, find_function
from hfedatm.base.privacy_settings import sends_plain_grams
from hfedatm.base.rule_keys import find_rule, given_to_rule
from hfedatm.base.seeding import derive, seed_torch
from hfedatm.base.settings import Settings
from hfedatm.base.text import names_in
from hfedatm.base.tiers import is_deep
from hfedatm.base.trained_part import ActivationSpec, FrozenPart, activations, join
from hfedatm.base.trust.policy import Policy
from hfedatm.contracts import Method, Rule
from hfedatm_core import ChannelGraph, Gram, collect_grams, forward
from hfedatm_core.data import DataSpec, DomainData, Inputs
from hfedatm_core.data.adapting import NotADomain, as_domains
from hfedatm_core.data_checks import BadDomain, check_domains
from hfedatm_core.hiding import hidden_names
from hfedatm_core.metrics import Metric
from hfedatm_core.robust.rules.base import RobustRule

# Built-in methods are plug-ins of a tier above, so they are found by name like any other.
BUILT_IN_METHODS = "client_app.methods"


class BadData(UserError):
    """A data set's examples cannot be trained on; ``fault`` gives the reason, not the examples."""

    def __init__(self, message: str, fault: str) -> None:
        super().__init__(message)
        self.fault = fault


def load_data(settings: Settings, data_dir: str | None = None) -> DomainData:
    """Load the data set; a process that serves many clients loads it once.

    If only a part of the model is trained, these are the activations before that part.
    ``data_dir`` is the folder to read, whatever the settings say; an empty string means no folder.
    """
    folder = Policy.current().data.folder or settings.data_dir if data_dir is None else data_dir
    find_task(settings.task)  # ask the policy, even if the data are loaded
    data = _load(settings.dataset, settings.dataset_params, folder, settings.task)
    if not settings.train_only:
        return data
    return activations(data, frozen_part_of(settings, data.spec), pick_device(settings))


@lru_cache(maxsize=2)
def _load(dataset: str, params: str, data_dir: str, task: str) -> DomainData:
    load = find_dataset(dataset)
    check_call("dataset", load, "load(data_dir, **params) -> DomainData", "data_dir")
    options = options_for("dataset", load, params, f"data set {dataset!r}", "data_dir")
    with calling("dataset", dataset):
        data: Any = load(data_dir or None, **options)
    if not isinstance(data, DomainData):
        raise UserError(f"dataset: {dataset!r} returned {type(data).__name__}, not a DomainData")
    try:
        checked = as_domains(data)
    except NotADomain as error:
        name, why = error.args
        raise BadData(f"dataset: {dataset!r}, domain {name!r}: {why}", why) from None
    with calling("task", task):
        try:
            check_domains(checked, find_task(task)(data.spec))
        except BadDomain as error:
            raise BadData(f"dataset: {dataset!r}, {error}", error.fault) from None
    return checked


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
    cls = find_rule(settings.server_rule)
    rule: Rule = construct("rule-params", cls, given_to_rule(settings))
    rule.check(settings)
    if is_deep(settings):
        rule.check_tiers(settings)
    return rule


def build_robust(settings: Settings, tier: Literal["clients", "stations"]) -> RobustRule:
    """Make the robust rule that chooses a tier's updates before they are averaged."""
    key = f"robust-{tier}"
    name = settings.robust_clients if tier == "clients" else settings.robust_stations
    cls = find_class(key, name, hfedatm_core.robust.rules, RobustRule, "hfedatm.robust")
    rule: RobustRule = construct(key, cls, {"liars": settings.robust_liars})
    return rule


def build_metrics(settings: Settings, spec: DataSpec) -> dict[str, Metric]:
    """Make the metrics of the evaluation, keyed by their names in the results."""
    metrics: dict[str, Metric] = {}
    for name in names_in(settings.metrics):
        cls = find_class("metrics", name, hfedatm_core.metrics, Metric, "hfedatm.metrics")
        label = name.partition(":")[2] or name
        require_classes(settings, cls, f"metrics: {name!r}")
        if label in metrics:
            raise UserError(f"metrics: two of them are called {label!r}")
        metric: Metric = construct("metrics", cls, {"num_classes": spec.num_classes})
        metric.task = build_task(settings, spec)  # type: ignore[misc]
        metrics[label] = metric
    return metrics


def build_method(settings: Settings, spec: DataSpec | None = None, client: int = 0) -> Method:
    """Make the client method, including the additions of the server rule.

    A method that trains needs the ``spec``, from which its learning task is made, and the number of
    its ``client``.
    """
    package = import_module(BUILT_IN_METHODS)
    cls = find_class("client-method", settings.client_method, package, Method, "hfedatm.methods")
    require_classes(settings, cls, f"client-method: {settings.client_method!r}")
    method: Method = construct("client-params", cls, parse_params(settings.client_params))
    wrapped = build_rule(settings).on_client(method)
    if spec is not None:
        for one in (method, wrapped):
            one.task = build_task(settings, spec)  # type: ignore[misc]
            one.client, one.clients = client, settings.num_clients  # type: ignore[misc]
    return wrapped


def build_model(
    settings: Settings, spec: DataSpec, method: Method, station: int | None = None
) -> nn.Module:
    """Make the network the method trains, with the same initial weights on every tier.

    With a ``station`` the initial weights are that station's own.
    """
    with torch.random.fork_rng(devices=[]):
        own = () if station is None else ("station", station)
        seed_torch(derive(settings.seed, "model", *own))
        part = frozen_part(settings, spec)
        if part is None:
            model = build_network(settings, spec)
        else:  # the frozen part need not be built again for every task
            model = part.end(None if station is None else build_network(settings, part.before))
        if settings.fix_model:
            from hfedatm_core.privacy.dpsgd import fix_model  # late: Opacus is slow to import

            model = fix_model(model)
        with calling("client-method", settings.client_method):
            return method.adapt(model)


def whole_model(settings: Settings, spec: DataSpec, method: Method) -> nn.Module:
    """Make the network with its frozen part, as checkpoints hold it."""
    model = build_model(settings, spec, method)
    part = frozen_part(settings, spec)
    return model if part is None else join(initial_network(settings, part.before), model, part)


def frozen_part(settings: Settings, spec: DataSpec) -> FrozenPart | None:
    """Return the part of the network that is not trained; None if all of it is."""
    if not isinstance(spec, ActivationSpec):
        return None
    return frozen_part_of(settings, spec.before)


def try_model(settings: Settings, model: nn.Module, spec: DataSpec) -> None:
    """Refuse a model whose outputs do not have the shape that the task needs."""
    task = build_task(settings, spec)
    example = spec.example()
    with calling("model", settings.model), torch.no_grad():
        scores: Any = forward(model.eval(), example)
    model.train()
    shape = tuple(getattr(scores, "shape", ()))
    if shape != (2, *task.output_shape):
        meaning = ": one score per class" if task.has_classes else f" (task={settings.task})"
        raise UserError(
            f"model: {settings.model!r} turns 2 examples into a {type(scores).__name__} of shape "
            f"{shape}; it must return a Tensor of shape {(2, *task.output_shape)}{meaning}"
        )


def measures_all(settings: Settings, round: int) -> bool:
    """Return whether this round's merge needs the Grams of all layers.

    Stations that did not start from one model are merged by all Grams, if the rule supports it.
    Noise and secure sums support only Grams of Linear layers.
    """
    apart = settings.station_start == "own" and round == 1
    wanted = settings.gram_layers == "all" or (
        settings.gram_layers == "auto" and apart and sends_plain_grams(settings)
    )
    if not wanted:
        return False
    return build_rule(settings).merges_apart


def gram_options(settings: Settings, round: int) -> dict[str, Any]:
    """Return which Grams are collected in a round, and in which form."""
    return {
        "max_dim": settings.gram_max_dim,
        "rank": settings.gram_rank,
        "conv": settings.regmean_conv,
        "bias": settings.regmean_bias == "exact",
        "full": measures_all(settings, round),
        "groups": False,  # Grams of convolutions in groups have no wire form
    }


def example_grams(
    settings: Settings, model: nn.Module, spec: DataSpec, round: int = 0
) -> dict[str, Gram]:
    """Return Grams of two made-up examples: which layers have or share one, and its width."""
    return open_grams(settings, model, [(spec.example(), None)], round)


def open_grams(
    settings: Settings, model: nn.Module, batches: Iterable[tuple[Inputs, Any]], round: int = 0
) -> dict[str, Gram]:
    """Return the Grams of these examples in the form of the settings, not clipped or noised."""
    return collect_grams(model, batches, **gram_options(settings, round))


def trace_channels(
    settings: Settings, rule: Rule | None, model: nn.Module, spec: DataSpec
) -> ChannelGraph:
    """Follow the channels of a model; log which layers stay unaligned only if the rule aligns."""
    inputs = spec.example()
    example = tuple(inputs.values()) if isinstance(inputs, dict) else (inputs,)
    # A user's own rule may align as well, unless it declares that it does not.
    aligns = rule is not None and getattr(rule, "fot", ":" in settings.server_rule)
    hidden = hidden_names(model)
    tracing = logging.getLogger("hfedatm_core.channels.tracing")
    before, tracing.disabled = tracing.disabled, tracing.disabled or not aligns or bool(hidden)
    try:
        return ChannelGraph.trace(model, example).without(hidden)
    finally:
        tracing.disabled = before


def pick_device(settings: Settings) -> torch.device:
    """Return the device to compute on; ``auto`` takes a GPU when there is one."""
    if settings.device != "auto":
        device = torch.device(settings.device)
        if not _is_there(device):
            raise UserError(f"device: this machine has no {device}; 'auto' takes one it has")
        return device
    return _best_device()


@cache  # a process that serves many clients asks once per client
def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _is_there(device: torch.device) -> bool:
    if device.type == "cuda":
        return (device.index or 0) < torch.cuda.device_count()
    return device.type == "cpu" or torch.backends.mps.is_available()
