"""Batches to measure a network on: images in a folder, or batches of a user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hfedatm_core.checkpoints.sources import Network
from hfedatm_core.data.folder import decode_image
from hfedatm_core.inputs import Batch


class ImageBatches:
    """All images of a folder and its subfolders, as inputs of a network.

    The images are scaled to the network's input size and normalised by its mean and standard
    deviation; for a network with one channel they become grey, between 0 and 1. No labels are
    needed.
    """

    def __init__(self, folder: Path | str, network: Network, size: int = 32) -> None:
        from torchvision.datasets.folder import IMG_EXTENSIONS

        root = Path(folder).expanduser()
        found = root.rglob("*") if root.is_dir() else ()
        self.files = sorted(path for path in found if path.suffix.lower() in IMG_EXTENSIONS)
        if not self.files:
            raise ValueError(f"{root} holds no images ({', '.join(IMG_EXTENSIONS)})")
        example = network.example
        image = example.get("pixel_values") if isinstance(example, Mapping) else example
        if image is None or image.ndim != 4 or image.shape[2] != image.shape[3]:
            raise ValueError(
                "this network takes no square images: give the batches by package.module:function"
            )
        self._named = isinstance(example, Mapping)
        self._channels, self._side, self._size = image.shape[1], image.shape[2], size
        self._mean = torch.tensor(network.mean).view(-1, 1, 1)
        self._std = torch.tensor(network.std).view(-1, 1, 1)

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self.files) // self._size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches, always in the same order."""
        for start in range(0, len(self.files), self._size):
            chosen = self.files[start : start + self._size]
            images = torch.stack([self._image(path) for path in chosen])
            yield ({"pixel_values": images} if self._named else images), None

    def _image(self, path: Path) -> Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(decode_image(path, self._side))) / 255
        if self._channels == 1:
            return pixels.mean(0, keepdim=True)
        return (pixels - self._mean) / self._std


def as_batches(made: Iterable[Any]) -> Iterator[Batch]:
    """Yield ``(inputs, None)`` for a user's function that yields inputs, or inputs and targets."""
    for item in made:
        inputs = item[0] if isinstance(item, tuple | list) else item
        yield inputs, None


class FunctionBatches:
    """The batches of a user's function, which is called anew whenever they are read."""

    def __init__(self, function: Callable[[], Iterable[Any]]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches."""
        return as_batches(self._function())
