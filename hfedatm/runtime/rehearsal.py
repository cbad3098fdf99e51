"""Rehearse all work of a client with one real batch, before any node is asked to do it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from client_app.data import shares_of
from client_app.train_fn import call_train_fn, load_train_fn
from client_app.training import torch_threads, train_locally
from hfedatm.base.batches import Batches
from hfedatm.base.building import build_metrics, open_grams, pick_device, target_domain
from hfedatm.base.errors import UserError
from hfedatm.base.evaluation import evaluate
from hfedatm.base.learning import find_augmentations
from hfedatm.base.metric_sums import leave_clients, require_bounded, values
from hfedatm.base.plugins import calling
from hfedatm.base.privacy_settings import gram_mechanism
from hfedatm.base.records import Task
from hfedatm.base.schedule import learning_rate
from hfedatm.base.seeding import derive, seed_torch
from hfedatm.base.settings import Settings
from hfedatm.base.tiers import children, levels
from hfedatm.base.trust.policy import Policy
from hfedatm.contracts import Method, Rule, TrainingContext
from hfedatm_core import Gram, forward
from hfedatm_core.data import Domain, DomainData, concat
from hfedatm_core.tensors import is_finite


def rehearse(
    settings: Settings, data: DomainData, rule: Rule, method: Method, model: nn.Module
) -> list[str]:
    """Train, evaluate and measure with one real batch; return errors that some clients will have.

    No result is kept. The server of a deployment may hold only the unseen domain: then nothing is
    rehearsed, and each node meets its errors itself.

    Raises
    ------
    UserError
        For any error that every client would have.
    """
    examples = _examples(settings, data)
    if examples is None:
        return []
    model = copy.deepcopy(model)
    device = pick_device(settings)
    batch = Batches(examples, data.spec, settings.batch_size, device)
    with torch.random.fork_rng(devices=[]), torch_threads(settings.threads):
        seed_torch(derive(settings.seed, "rehearsal"), device)
        model.to(device)
        with calling("model", settings.model), torch.no_grad():
            forward(model.eval(), next(iter(batch))[0])
        train = batch
        if settings.augment:
            changes = find_augmentations(settings)
            train = Batches(examples, data.spec, settings.batch_size, device, 0, changes)
        once = settings.model_copy(update={"local_epochs": 1})
        if settings.train_fn:
            with _blaming("train-fn", settings.train_fn):
                _train_with(once, method, model, train, device)
        else:
            with _blaming("client-method", settings.client_method):
                _train(once, rule, method, model, train)
        grams: dict[str, Gram] = {}
        metrics = build_metrics(settings, data.spec)
        with calling("model", settings.model):
            found = evaluate(model, batch, metrics, method.task)
            if rule.needs_grams:
                grams = open_grams(settings, model, batch)
    if leave_clients(settings):
        require_bounded(found.sums, found.examples)
    values(metrics, found.sums)
    return _too_few_rows(settings, grams, len(examples), data.spec.kind == "text")


def _examples(settings: Settings, data: DomainData) -> Domain | None:
    """Return one batch of the client with the fewest examples, or of a deployed server's data."""
    if Policy.current().is_owners:
        unseen = target_domain(settings, data)
        own = [domain for name, domain in data.domains.items() if name != unseen][:1]
    else:
        share = min(shares_of(settings), key=lambda share: sum(map(len, share.values())))
        own = [data.domains[name].subset(index) for name, index in share.items() if len(index)]
    if not own:
        return None
    domain = concat(own)
    return domain.subset(torch.arange(min(settings.batch_size, len(domain))))


@contextmanager
def _blaming(setting: str, name: str) -> Iterator[None]:
    """Name the setting in any error of its code."""
    try:
        with calling(setting, name):
            yield
    except UserError as error:
        if str(error).startswith(f"{setting}: "):
            raise
        raise UserError(f"{setting}: {error}") from error.__cause__


def _train(
    settings: Settings, rule: Rule, method: Method, model: nn.Module, batch: Batches
) -> None:
    shared = method.share(model, batch) if method.sharing != "none" else {}
    station = rule.at_station()
    received = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    station.begin(Task("train", settings, 1, station=0), received, rule.shared(), {})
    method.begin(model, {**shared, **station.shared(1)}, {})
    train_locally(model, method, batch, settings, learning_rate(settings, 1, 1))
    method.finish(model, batch)
    _check_weights(model, settings.lr)
    method.remember()
    if missing := set(rule.reports) - {"loss", *method.metrics()}:
        raise UserError(
            f"server-rule {settings.server_rule} needs each client to report "
            f"{', '.join(sorted(missing))}: metrics() must return it"
        )


def _train_with(
    settings: Settings, method: Method, model: nn.Module, batch: Batches, device: torch.device
) -> None:
    lr = learning_rate(settings, 1, 1)
    context = TrainingContext(1, 1, lr, batch, device, task=method.task)
    received = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    function = load_train_fn(settings)
    metrics = call_train_fn(function, model, batch, received, settings, context)
    if not math.isfinite(metrics["loss"]):
        raise UserError(f"the loss of one batch is {metrics['loss']}: lower lr")
    _check_weights(model, settings.lr)


def _check_weights(model: nn.Module, lr: float) -> None:
    for name, tensor in model.state_dict().items():
        if not is_finite(tensor):
            raise UserError(f"{name} is not finite after one batch at lr {lr:g}: lower lr")


def _too_few_rows(
    settings: Settings, grams: dict[str, Gram], examples: int, text: bool
) -> list[str]:
    """Return how many clients' Grams will be refused; refuse the run if no round can succeed.

    For images and vectors, a layer has the same number of rows per example. For text, this is known
    only of layers that see one row per example.
    """
    known = {
        layer: gram.rows // examples
        for layer, gram in grams.items()
        if not text or gram.rows == examples
    }
    if not known or gram_mechanism(settings).noised or Policy.current().is_owners:
        return []
    layer = min(known, key=lambda name: known[name])
    each, limit = settings.clients_per_station, settings.gram_batches * settings.batch_size
    rows = []
    for share in shares_of(settings):
        held = sum(len(part) - _held_out(settings, len(part)) for part in share.values())
        rows.append((min(held, limit) if limit else held) * known[layer])
    few = [count < settings.gram_min_rows for count in rows]
    if not any(few):
        return []
    says = (
        f"{sum(few)} of {len(few)} clients have too few examples: the Gram of {layer} is made of "
        f"{min(rows)} rows, fewer than gram-min-rows = {settings.gram_min_rows}, and is refused. "
        "Use fewer clients, a rule without Grams (server-rule=avg), or turn on privacy.mechanism"
    )
    stations = [few[start : start + each].count(False) for start in range(0, len(few), each)]
    needed = max(1, math.ceil(settings.client_quorum * each))
    if not _reach_quorum(settings, [count >= needed for count in stations]):
        raise UserError(says)
    return [says]


def _reach_quorum(settings: Settings, usable: list[bool]) -> bool:
    """Return whether enough stations answer at every level, if these lowest ones do."""
    for level in range(levels(settings) - 1, -1, -1):
        each = children(settings, level)
        needed = max(1, math.ceil(settings.station_quorum * each))
        groups = [usable[start : start + each] for start in range(0, len(usable), each)]
        usable = [sum(group) >= needed for group in groups]
    return usable[0]


def _held_out(settings: Settings, examples: int) -> int:
    """Return how many of these examples are held out; see `split_validation`."""
    return max(0, min(round(settings.validation_fraction * examples), examples - 1))
