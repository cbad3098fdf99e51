"""Rotated digits: scikit-learn's 1,797 real handwritten digits, one angle per domain.

The data set needs no download. As in rotated MNIST, each domain has images of its own, so that no
digit of the unseen domain was trained on at another angle.
"""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hfedatm_core.data.base import DataSpec, Domain, DomainData

ANGLES = (0, 15, 30, 45, 60, 75)
DOMAINS = tuple(str(angle) for angle in ANGLES)
# A digit fills its 8x8 frame; at 0.8 of the width nothing is cut off when it is rotated.
ZOOM = 0.8


def load(
    data_dir: Path | str | None = None,
    *,
    size: int = 32,
    images: Literal["disjoint", "all"] = "disjoint",
) -> DomainData:
    """Make the six domains ``"0"``, ``"15"``, ..., ``"75"`` (degrees, counter-clockwise).

    Parameters
    ----------
    data_dir
        Not used; the images come with scikit-learn.
    size
        Side of the square images in pixels.
    images
        ``"disjoint"``: the images are dealt over the domains, class by class, 299 or 300 each.
        ``"all"``: every domain has all 1,797 images. The unseen domain then shows the very digits
        that were trained on, only rotated: an easier and less honest task.
    """
    if images not in ("disjoint", "all"):
        raise ValueError(f"images must be 'disjoint' or 'all', not {images!r}")
    if size < 8:
        raise ValueError(f"size must be at least 8 pixels, the size of the originals, not {size}")
    table = _table()
    pictures = table[:, :-1].float().div(16).view(-1, 1, 8, 8)
    targets = table[:, -1].long()
    by_class = torch.argsort(targets, stable=True)
    domains = {}
    for number, (name, angle) in enumerate(zip(DOMAINS, ANGLES, strict=True)):
        own = by_class[number :: len(ANGLES)] if images == "disjoint" else by_class
        rows = own.sort().values
        domains[name] = Domain(name, _rotate(pictures[rows], angle, size), targets[rows])
    names = tuple(str(digit) for digit in range(10))
    spec = DataSpec("image", 10, (1, size, size), names, mean=(0.5,), std=(0.5,))
    return DomainData(spec, domains)


def _table() -> Tensor:
    """Return a row per digit: its 64 pixels and its class."""
    # The file alone: importing scikit-learn takes seconds and 100 MB in every client.
    package = find_spec("sklearn")
    for place in package.submodule_search_locations or () if package else ():
        file = Path(place) / "datasets/data/digits.csv.gz"
        if file.is_file():
            return torch.from_numpy(np.loadtxt(file, delimiter=","))
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(np.column_stack([pixels, labels]))


def _rotate(pictures: Tensor, degrees: float, size: int) -> Tensor:
    """Enlarge and rotate in one bilinear resampling, so the strokes are blurred only once."""
    angle = math.radians(degrees)
    cosine, sine = math.cos(angle) / ZOOM, math.sin(angle) / ZOOM
    # affine_grid maps output to input coordinates, with the vertical axis pointing down.
    matrix = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]])
    grid = functional.affine_grid(
        matrix.expand(len(pictures), 2, 3), [len(pictures), 1, size, size], align_corners=False
    )
    rotated = functional.grid_sample(pictures, grid, align_corners=False)
    return rotated.mul(255).round().clamp(0, 255).to(torch.uint8)
