"""The examples of a client: its share of a partitioned data set, or a folder of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hfedatm.base.building import BadData, find_dataset, load_data, target_domain
from hfedatm.base.counting import require_countable
from hfedatm.base.errors import UserError
from hfedatm.base.learning import build_task
from hfedatm.base.seeding import derive
from hfedatm.base.settings import Settings
from hfedatm.base.trust.policy import Policy, PolicyRefusal
from hfedatm_core.data import DataSpec, Domain, DomainData, concat
from hfedatm_core.data.base import match_name
from hfedatm_core.data.split import client_shares, split_validation, station_order

log = logging.getLogger("hfedatm")


@dataclass(frozen=True)
class ClientData:
    """The examples of one client."""

    spec: DataSpec
    train: Domain
    validation: list[Domain]


@lru_cache(maxsize=4)
def shares_of(settings: Settings, data_dir: str | None = None) -> list[dict[str, torch.Tensor]]:
    """Return the shares of all clients in the order of their ids, station by station."""
    data = load_data(settings, data_dir)
    held_out = target_domain(settings, data)
    sources = [name for name in data.domains if name != held_out]
    seed = derive(settings.seed, "partition")
    try:
        shares = client_shares(data, sources, settings.num_clients, settings.lam, seed)
    except ValueError as error:
        raise UserError(f"stations x clients-per-station: {error}") from None
    mode, counts = settings.station_assignment, None
    if mode == "suggest":  # clients stay where they are
        mode = "domain"
    if mode == "eara":
        counts = torch.stack([class_counts(settings, data, share) for share in shares])
    order = station_order(shares, settings.stations, mode, counts)
    return [shares[index] for station in order for index in station]


def class_counts(settings: Settings, data: DomainData, share: Mapping[str, torch.Tensor]) -> Any:
    """Return how many examples of each class a client holds."""
    require_countable(settings)
    held = [data.domains[name].targets[index] for name, index in share.items()]
    return torch.cat(held).bincount(minlength=data.spec.num_classes)


def data_folder(settings: Settings, node_config: Mapping[str, Any], policy: Policy) -> str:
    """Return the folder this node reads: its owner's or, without an owner's policy, the run's."""
    own = policy.data.folder or str(node_config.get("data-dir", ""))
    return own if own or policy.is_owners else settings.data_dir


def data_identity(settings: Settings, node_config: Mapping[str, Any], policy: Policy) -> str:
    """Return a name for this node's data: equal data have one name, whatever a run says."""
    if folder := data_folder(settings, node_config, policy):
        return f"folder {Path(folder).expanduser().resolve()}"
    load = find_dataset(settings.dataset)
    return f"data set {load.__module__}:{getattr(load, '__qualname__', settings.dataset)}"


def client_data(settings: Settings, client: int, node_config: Mapping[str, Any]) -> ClientData:
    """Return a client's examples, split into training and validation.

    A node whose policy or ``node-config`` names a folder, and which has no ``partition-id``, owns
    all of that folder. Any other node has a share of the partitioned data set: share number
    ``client``, or on a deployed node the number its owner gave it. No example is of the held-out
    domain.
    """
    policy = Policy.current()
    folder = data_folder(settings, node_config, policy)
    if policy.is_owners and "partition-id" in node_config:
        client = int(node_config["partition-id"])
    elif settings.station_assignment == "eara" and _owns_folder(node_config, policy):
        raise UserError(
            "station-assignment: eara divides a data set over clients, but this node has data of "
            "its own and belongs to the station that it is connected to. 'hfedatm assign --ask' "
            "asks for class counts and suggests stations; then set station-assignment=domain"
        )
    try:
        spec, own = _own_domains(settings, client, folder, node_config, policy)
    except UserError as error:
        if not (policy.is_owners and folder) or isinstance(error, PolicyRefusal):
            raise
        # The error may quote the owner's folder, so its text stays in this node's log. A fault in
        # the form of the data is reported: the person who started the run can correct that.
        log.error("%s: %s", folder, error)
        if isinstance(error, BadData):
            raise UserError(
                f"dataset: this node's own data cannot be used as {settings.dataset!r}: "
                f"{error.fault}; the node's log says where"
            ) from None
        raise UserError(
            f"dataset: this node's own data cannot be loaded as {settings.dataset!r} with "
            f"target-domain {settings.target_domain!r}; the node's log says why"
        ) from None
    train, validation, task = [], [], build_task(settings, spec)
    for domain in own:
        groups = task.strata(domain.targets)
        kept, held = split_validation(groups, settings.validation_fraction, settings.seed)
        train.append(domain.subset(kept) if len(held) else domain)
        if len(held):
            validation.append(domain.subset(held))
    return ClientData(spec, concat(train), validation)


def _owns_folder(node_config: Mapping[str, Any], policy: Policy) -> bool:
    """Return whether all of this node's folder is its own, rather than a share of a data set."""
    whole = bool(policy.data.folder) or "data-dir" in node_config
    return whole and "partition-id" not in node_config


def _own_domains(
    settings: Settings, client: int, folder: str, node_config: Mapping[str, Any], policy: Policy
) -> tuple[DataSpec, list[Domain]]:
    data = load_data(settings, folder)
    if _owns_folder(node_config, policy):
        target = settings.target_domain
        held_out = match_name(target, data.domains, data.aliases)
        own = [d for name, d in data.domains.items() if name != held_out]
        if not own:
            raise UserError(
                f"{folder} holds only the held-out domain {target!r}: nothing to train on"
            )
        return data.spec, own
    if not 0 <= client < settings.num_clients:
        raise UserError(
            f"client {client}: stations x clients-per-station makes {settings.num_clients} "
            f"shares, numbered from 0; set partition-id in the node-config to one of them"
        )
    share = shares_of(settings, folder)[client]
    own = [data.domains[name].subset(index) for name, index in share.items() if len(index)]
    return data.spec, own
