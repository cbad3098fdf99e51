"""The way from every station's model to the target's, built and proved before round 1."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hfedatm.base.building import build_model, example_grams, measures_all
from hfedatm.base.errors import UserError
from hfedatm.base.settings import Settings
from hfedatm.base.station_models import parse_station_models, settings_of
from hfedatm.contracts import Method, Rule
from hfedatm_core.data import DataSpec
from hfedatm_core.resizing import Architecture, Fit, NoFit, prove


@dataclass(frozen=True)
class StationFit:
    """A station's way to the target, and the layers whose Grams it sends, with their widths."""

    fit: Fit
    layers: dict[str, int]
    all_layers: dict[str, int]


def station_fits(
    settings: Settings, spec: DataSpec, method: Method, rule: Rule, model: nn.Module
) -> dict[int, StationFit]:
    """Return the way of every station whose model differs from the target's.

    Raises
    ------
    UserError
        A model cannot be matched with the target, or the rule or the method sends arrays of the
        target's shape to the nodes.
    """
    own = parse_station_models(settings.station_models, settings.stations)
    if not own:
        return {}
    _check_plugins(settings, method, rule)
    goal = Architecture.of(model, spec.example(), f"{settings.model}({settings.model_params})")
    known: dict[tuple[str, str], StationFit] = {}
    for station, named in own.items():
        if named in known:
            continue
        asked = settings_of(settings, station)
        try:
            network = build_model(asked, spec, method)
            other = Architecture.of(network, spec.example(), f"{named[0]}({named[1]})")
            fit = Fit(goal, other, uneven=True)
            prove(fit)
            _require_exact(settings, fit)
        except (NoFit, UserError) as error:
            raise UserError(f"station-models: station {station}: {error}") from None
        layers: list[dict[str, int]] = [{}, {}]
        for place, round in enumerate((0, 1)):
            if rule.needs_grams:
                found = example_grams(asked, network, spec, round)
                layers[place] = {name: gram.dim for name, gram in found.items()}
        known[named] = StationFit(fit, layers[0], layers[1])
    _require_owners(settings, known, own)
    return {s: known[named] for s, named in own.items() if not known[named].fit.is_same}


def _require_exact(settings: Settings, fit: Fit) -> None:
    """Refuse a target that cannot hold what a station with a start of its own has trained."""
    if settings.station_start == "own" and not fit.is_exact:
        raise UserError(
            f"{fit}: with station-start=own the target must be at least as wide and deep as every "
            "station's model: choose a larger model, or station-start=shared"
        )


def _check_plugins(settings: Settings, method: Method, rule: Rule) -> None:
    grams = rule.wants_grams(1, settings.rounds) and measures_all(settings, 1)
    if settings.station_start == "own" and not grams:
        raise UserError(
            "station-models: with station-start=own stations are matched by the Grams of all "
            "layers, which this run does not send in round 1: set server-rule=hfedatm and "
            "gram-layers=auto, without noise, secure sums and every, or choose station-start=shared"
        )
    if method.sharing != "none":
        raise UserError(
            f"station-models: client-method {settings.client_method!r} averages arrays of the "
            "model's shape over all clients, and these models have different shapes"
        )
    if any(rule.wants_profiles(settings, r) for r in range(1, settings.rounds + 1)):
        raise UserError(
            "station-models: class profiles describe channels of the target, which these stations "
            "do not have: turn the rule's profiles off"
        )
    kind = type(rule)
    parts = (kind.at_station, kind.shared, kind.on_client)
    if parts != (Rule.at_station, Rule.shared, Rule.on_client):
        raise UserError(
            f"station-models: server-rule {settings.server_rule!r} sends arrays of the target's "
            "shape to stations and clients, and their models have other shapes"
        )


def _require_owners(
    settings: Settings,
    known: dict[tuple[str, str], StationFit],
    own: dict[int, tuple[str, str]],
) -> None:
    """Refuse a target with a block that no station has: nobody would ever train it."""
    if len(own) < settings.stations:
        return
    lacked = set.intersection(*(set(found.fit.absent) for found in known.values()))
    if lacked:
        raise UserError(
            f"station-models: no station has {min(lacked).rpartition('.')[0]} of the target "
            f"{settings.model}: nobody would train it"
        )
