"""Four real digit domains with the same ten classes: MNIST, MNIST-M, USPS and Optdigits.

Each domain is a file ``digits4/digits_<domain>.npz`` with ``x_train, y_train, x_test, y_test``
(uint8 images ``N x H x W`` or ``N x H x W x 3`` of any size; integer labels).
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hfedatm_core.data.base import DataSpec, Domain, DomainData, match_name, name_list

DOMAINS = ("mnist", "mnistm", "usps", "optdigits")
PARTS = ("train", "test")


def load(
    data_dir: Path | str | None = None,
    *,
    size: int = 32,
    domains: str | Sequence[str] | None = None,
) -> DomainData:
    """Load the domains whose files exist, train and test parts together, as RGB.

    Parameters
    ----------
    data_dir
        The folder above ``digits4``, or that folder itself.
    size
        Images are resized to ``size x size`` pixels.
    domains
        Domains to load; by default all whose files exist.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1 pixel, not {size}")
    files = _locate(data_dir)
    wanted = name_list(domains) or tuple(files)
    loaded = {}
    for name in wanted:
        found = match_name(name, files)
        if found is None:
            raise ValueError(f"domain {name!r} is not there; found: {', '.join(files)}")
        loaded[found] = _read(found, files[found], size)
    names = tuple(str(digit) for digit in range(10))
    spec = DataSpec("image", 10, (3, size, size), names, mean=(0.5,) * 3, std=(0.5,) * 3)
    return DomainData(spec, loaded)


def _locate(data_dir: Path | str | None) -> dict[str, Path]:
    where = Path(data_dir).expanduser() if data_dir is not None and str(data_dir) else None
    for folder in (where / "digits4", where) if where is not None else ():
        files = {name: folder / f"digits_{name}.npz" for name in DOMAINS}
        present = {name: path for name, path in files.items() if path.is_file()}
        if present:
            return present
    expected = (where or Path("<data directory>")) / "digits4"
    raise FileNotFoundError(
        "digits4 is not in the data directory.\n"
        "Get it: save the images and labels of MNIST, MNIST-M, USPS and Optdigits as npz files "
        "with x_train, y_train, x_test, y_test (uint8 images, integer labels)\n"
        f"Put it: {expected}/digits_<domain>.npz, with the domains {', '.join(DOMAINS)}, and set "
        f"the data directory to {expected.parent}"
    )


def _read(name: str, path: Path, size: int) -> Domain:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images = np.concatenate([arrays[f"x_{part}"] for part in PARTS])
            labels = np.concatenate([arrays[f"y_{part}"] for part in PARTS])
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"cannot read {path}: {error}; it must hold x_train, y_train, x_test, y_test"
        ) from error
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[3:] not in ((), (3,)):
        raise ValueError(
            f"{path}: images must be uint8, N x H x W or N x H x W x 3, "
            f"not {images.dtype} {images.shape}"
        )
    if labels.min() < 0 or labels.max() > 9:
        raise ValueError(f"{path}: labels must be 0..9, found {labels.min()}..{labels.max()}")
    return Domain(name, _resize(torch.from_numpy(images), size), torch.from_numpy(labels).long())


def _resize(images: Tensor, size: int) -> Tensor:
    """Return ``N x 3 x size x size`` uint8; gray images are repeated over the colours."""
    colours = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    if colours.shape[-2:] != (size, size):
        resized = functional.interpolate(
            colours.float(), size=(size, size), mode="bilinear", antialias=True
        )
        colours = resized.round().clamp(0, 255).to(torch.uint8)
    return colours.expand(-1, 3, -1, -1).contiguous()
