"""Refuse a run whose model, method or rule cannot keep the promise of its privacy settings."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from hfedatm.base.building import example_grams
from hfedatm.base.errors import UserError
from hfedatm.base.privacy_settings import gram_mechanism
from hfedatm.base.settings import Settings
from hfedatm.contracts import Method, Rule, StationRule
from hfedatm_core import FactorGram
from hfedatm_core.data import DataSpec


def check_privacy(
    settings: Settings, rule: Rule, method: Method, model: nn.Module, spec: DataSpec
) -> None:
    """Raise `UserError` that names the incompatible layer, method or rule, and the fix."""
    noised = gram_mechanism(settings).noised
    if noised and not rule.needs_grams:
        raise UserError(
            f"privacy.mechanism adds noise to Grams, but server-rule = {settings.server_rule!r} "
            "uses no Grams; dp-sgd=true protects the weights"
        )
    if noised or (settings.secure_aggregation and rule.needs_grams):
        _check_widths(settings, model, spec)
    if settings.dp_sgd:
        _check_dp_sgd(settings, rule, method, model, spec)
    if settings.secure_aggregation:
        station_rule = type(rule.at_station())
        if station_rule.weight is not StationRule.weight:
            raise UserError(
                f"secure-aggregation: server-rule = {settings.server_rule!r} weighs clients by "
                "their own reports, which a secure sum hides: choose another server-rule"
            )


def _check_widths(settings: Settings, model: nn.Module, spec: DataSpec) -> None:
    for layer, gram in example_grams(settings, model, spec).items():
        if isinstance(gram, FactorGram):
            what = "privacy noise" if gram_mechanism(settings).noised else "secure sums"
            raise UserError(
                f"gram-max-dim: layer {layer!r} has {gram.dim} inputs and would send a low-rank "
                f"factor, for which there are no {what}; raise gram-max-dim to {gram.dim} (a Gram "
                f"of {gram.dim * (gram.dim + 1) * 2 / 1e6:.0f} MB) or use a narrower model"
            )


def _check_dp_sgd(
    settings: Settings, rule: Rule, method: Method, model: nn.Module, spec: DataSpec
) -> None:
    if not method.per_example_loss:
        raise UserError(
            f"dp-sgd: the loss must be a mean over single examples, and only the model may leave "
            f"the client; client-method = {settings.client_method!r} with server-rule = "
            f"{settings.server_rule!r} does more: use client-method=fedavg with a rule that "
            "changes nothing at the clients, or dp-sgd=false"
        )
    from hfedatm_core.privacy.dpsgd import UnsupportedLayerError, check_opacus_model

    try:
        check_opacus_model(model)
    except UnsupportedLayerError as error:
        raise UserError(f"dp-sgd: model {settings.model!r}: {error}") from None
    _try_a_step(settings, method, copy.deepcopy(model), spec)


def _try_a_step(settings: Settings, method: Method, model: nn.Module, spec: DataSpec) -> None:
    """Train on two made-up examples, so that Opacus fails here and not in round 1."""
    from client_app.private_training import train_privately
    from hfedatm.base.batches import Batches
    from hfedatm_core.data import Domain
    from hfedatm_core.privacy.noise import NoiseSource

    examples = Domain("example", spec.example(), torch.zeros(2, dtype=torch.long))
    batches = Batches(examples, spec, 2, torch.device("cpu"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train_privately(
                model,
                method,
                batches,
                settings,
                settings.lr,
                sigma=1.0,
                sample_rate=1.0,
                steps=1,
                source=NoiseSource(),
            )
    except Exception as error:
        raise UserError(
            f"dp-sgd: Opacus cannot train model {settings.model!r}: {error}. Choose another model, "
            "or one whose layers do not overwrite their inputs (inplace)"
        ) from error
