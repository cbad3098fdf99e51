"""Which examples a client has: its share of a partitioned data set, or a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from hfedatm.assembly import load_data, target_domain
from hfedatm.errors import UserError
from hfedatm.seeding import derive, generator
from hfedatm.settings import Settings
from hfedatm_core.data import Batch, DataSpec, Domain, batches, concat
from hfedatm_core.data.base import match_name
from hfedatm_core.data.split import client_shares, split_validation, station_order


@dataclass(frozen=True)
class ClientData:
    """The examples of one client."""

    spec: DataSpec
    train: Domain
    validation: list[Domain]


class Batches:
    """Mini-batches of a client's examples; every pass over it is one epoch.

    With a seed each epoch is shuffled anew, in an order that depends on nothing but the seed.
    """

    def __init__(
        self,
        domain: Domain,
        spec: DataSpec,
        batch_size: int,
        device: torch.device,
        seed: int | None = None,
    ) -> None:
        self.domain, self._spec, self._size, self._device = domain, spec, batch_size, device
        self._seed, self._epoch = seed, 0

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch."""
        shuffle = None if self._seed is None else generator(self._seed, self._epoch)
        self._epoch += 1
        # A last batch of one example cannot pass BatchNorm in training.
        lonely = (
            shuffle is not None
            and len(self.domain) > self._size
            and len(self.domain) % self._size == 1
        )
        return batches(
            self.domain,
            self._spec,
            self._size,
            generator=shuffle,
            device=self._device,
            drop_last=lonely,
        )

    def pick(self, index: torch.Tensor) -> Batch:
        """Return these examples as one batch, which may be empty."""
        chosen = self.domain.subset(index)
        if len(index):
            return next(batches(chosen, self._spec, len(index), device=self._device))
        inputs, targets = next(batches(self.domain, self._spec, 1, device=self._device))
        none = (
            {key: value[:0] for key, value in inputs.items()}
            if isinstance(inputs, Mapping)
            else inputs[:0]
        )
        return none, targets[:0]

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return -(-len(self.domain) // self._size)


@lru_cache(maxsize=4)
def shares_of(settings: Settings, data_dir: str = "") -> list[dict[str, torch.Tensor]]:
    """Return the shares of all clients in the order of their ids, station by station."""
    data = load_data(settings, data_dir)
    held_out = target_domain(settings, data)
    sources = [name for name in data.domains if name != held_out]
    seed = derive(settings.seed, "partition")
    try:
        shares = client_shares(data, sources, settings.num_clients, settings.lam, seed)
    except ValueError as error:
        raise UserError(f"stations x clients-per-station: {error}") from None
    order = station_order(shares, settings.stations, settings.station_assignment)
    return [shares[index] for station in order for index in station]


def client_data(settings: Settings, client: int, node_config: Mapping[str, Any]) -> ClientData:
    """Return a client's examples, split into training and validation.

    A node whose ``node-config`` names a ``data-dir`` and no ``partition-id`` owns all of that
    folder; any other node has share number ``client`` of the partitioned data set. The held-out
    domain is never among them.
    """
    data_dir = str(node_config.get("data-dir", "")) or settings.data_dir
    data = load_data(settings, data_dir)
    if "data-dir" in node_config and "partition-id" not in node_config:
        target = settings.target_domain
        held_out = match_name(target, data.domains, data.aliases)
        own = [d for name, d in data.domains.items() if name != held_out]
        if not own:
            raise UserError(
                f"{data_dir} holds only the held-out domain {target!r}: nothing to train on"
            )
    else:
        if not 0 <= client < settings.num_clients:
            raise UserError(
                f"client {client}: stations x clients-per-station makes "
                f"{settings.num_clients} shares, "
                f"numbered from 0; set partition-id in the node-config to one of them"
            )
        share = shares_of(settings, data_dir)[client]
        own = [data.domains[name].subset(index) for name, index in share.items() if len(index)]
    train, validation = [], []
    for domain in own:
        kept, held = split_validation(domain.targets, settings.validation_fraction, settings.seed)
        train.append(domain.subset(kept) if len(held) else domain)
        if len(held):
            validation.append(domain.subset(held))
    return ClientData(data.spec, concat(train), validation)
