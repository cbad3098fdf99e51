"""Mini-batches of one node's examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from hfedatm.base.seeding import derive, generator
from hfedatm_core.augmentations import Augment
from hfedatm_core.data import Batch, DataSpec, Domain, batches


class Batches:
    """Mini-batches of a client's examples; every pass over them is one epoch.

    With a seed each epoch is shuffled anew, in an order that depends only on the seed, and each
    batch is changed by ``augment``, too. Without a seed batches are as stored.
    """

    def __init__(
        self,
        domain: Domain,
        spec: DataSpec,
        batch_size: int,
        device: torch.device,
        seed: int | None = None,
        augment: Sequence[Augment] = (),
    ) -> None:
        self.domain, self._spec, self._size, self._device = domain, spec, batch_size, device
        self._seed, self._epoch, self._augment = seed, 0, augment

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch."""
        shuffle = None if self._seed is None else generator(self._seed, self._epoch)
        self._epoch += 1
        # BatchNorm cannot train on a last batch of one example.
        lonely = (
            shuffle is not None
            and len(self.domain) > self._size
            and len(self.domain) % self._size == 1
        )
        found = batches(
            self.domain,
            self._spec,
            self._size,
            generator=shuffle,
            device=self._device,
            drop_last=lonely,
        )
        if self._seed is None or not self._augment:
            return found
        return self._augmented(found, generator(derive(self._seed, "augment"), self._epoch))

    def _augmented(self, found: Iterator[Batch], source: torch.Generator) -> Iterator[Batch]:
        for inputs, targets in found:
            for augment in self._augment:
                inputs, targets = augment(inputs, targets, source)
            yield inputs, targets

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
