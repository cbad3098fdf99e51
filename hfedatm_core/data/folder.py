"""Images in the layout ``<data set>/<domain>/<class>/<image>``, decoded once and cached.

This is the layout DomainBed uses. ``load`` reads any such folder; the modules of the known data
sets (`pacs`, `office_home`, `terra_incognita`) only describe their folders.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from hfedatm_core.data.base import DataSpec, Domain, DomainData, match_name, name_list
from hfedatm_core.data.cache import Array, cached_array, digest, file_signature
from hfedatm_core.discovery import suggest

logger = logging.getLogger(__name__)

# The statistics of ImageNet that torchvision's pretrained models expect.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class FolderLayout:
    """The folder of a known data set, and where to get it.

    Attributes
    ----------
    title
        The name in messages.
    folders
        Names the data set's own folder may have; messages recommend the first.
    domains, classes
        All its domains and classes, as DomainBed names their folders.
    source
        Where to get it.
    aliases
        Other names of domains.
    """

    title: str
    folders: tuple[str, ...]
    domains: tuple[str, ...]
    classes: tuple[str, ...]
    source: str
    aliases: Mapping[str, str] = field(default_factory=dict)


def load(
    data_dir: Path | str | None = None,
    *,
    size: int = 64,
    domains: str | Sequence[str] | None = None,
    classes: str | Sequence[str] | None = None,
) -> DomainData:
    """Load a folder of your own: ``<data_dir>/<domain>/<class>/<image>``.

    Parameters
    ----------
    data_dir
        The folder that holds one folder per domain.
    size
        Images are resized to ``size x size`` pixels.
    domains
        Which domains to load; all by default. A list or one string with commas or ``+``.
    classes
        All classes, in order. By default they are the sorted names of the existing class folders,
        so a site that holds only some of the classes must give the list.
    """
    if data_dir is None or not str(data_dir):
        raise ValueError("this data set needs a data directory with <domain>/<class>/<image>")
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; it must hold <domain>/<class>/<image>")
    present = {path.name: path for path in _folders(root)}
    chosen = _choose(name_list(domains), present, {}, root)
    names = name_list(classes) or tuple(
        sorted({path.name for domain in chosen for path in _folders(present[domain])})
    )
    return _load({name: present[name] for name in chosen}, names, size, {})


def load_layout(
    layout: FolderLayout,
    data_dir: Path | str | None,
    size: int,
    domains: str | Sequence[str] | None,
    classes: str | Sequence[str] | None,
) -> DomainData:
    """Load a known data set; ``data_dir`` is its own folder or the folder above.

    The folder may hold only some of the domains (a site with its own share of the data). The class
    list is always that of the whole data set, so that all sites number the classes alike.
    """
    present, root = _locate(layout, data_dir)
    wanted = name_list(domains)
    chosen = _choose(wanted, present, layout.aliases, root)
    absent = [name for name in layout.domains if name not in present]
    if absent and wanted is None:
        logger.warning(
            "%s: %s has no folder for %s; going on with %s",
            layout.title,
            root,
            ", ".join(absent),
            ", ".join(chosen),
        )
    names = name_list(classes) or layout.classes
    return _load({name: present[name] for name in chosen}, names, size, layout.aliases)


def decode_image(path: Path, size: int) -> Array:
    """Read one image as uint8 RGB, ``3 x size x size``."""
    try:
        with Image.open(path) as image:
            # A JPEG is decoded at the smallest scale that is still larger than needed.
            image.draft("RGB", (size, size))
            pixels = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot read the image {path}: {error}; replace or remove it") from error
    return np.asarray(pixels, dtype=np.uint8).transpose(2, 0, 1)


def _locate(layout: FolderLayout, data_dir: Path | str | None) -> tuple[dict[str, Path], Path]:
    """Return the existing domain folders, by domain, and the folder that holds them."""
    where = Path(data_dir).expanduser() if data_dir is not None and str(data_dir) else None
    candidates = [where / name for name in layout.folders] + [where] if where is not None else []
    for candidate in candidates:
        found: dict[str, Path] = {}
        for path in _folders(candidate) if candidate.is_dir() else []:
            name = match_name(path.name, layout.domains, layout.aliases)
            if name is not None:
                found[name] = path
        if found:
            return {name: found[name] for name in layout.domains if name in found}, candidate
    expected = (where or Path("<data directory>")) / layout.folders[0]
    looked = f"looked in {', '.join(map(str, candidates))}" if candidates else "none is set"
    raise FileNotFoundError(
        f"{layout.title} is not in the data directory ({looked}).\n"
        f"Get it: {layout.source}\n"
        f"Put it: {expected}/<domain>/<class>/<image>, with the domains "
        f"{', '.join(layout.domains)}, and set the data directory to {expected.parent}"
    )


def _choose(
    wanted: tuple[str, ...] | None,
    present: Mapping[str, Path],
    aliases: Mapping[str, str],
    root: Path,
) -> list[str]:
    if not present:
        raise FileNotFoundError(f"{root} has no domain folders; expected <domain>/<class>/<image>")
    if wanted is None:
        return list(present)
    chosen = []
    for name in wanted:
        found = match_name(name, present, aliases)
        if found is None:
            raise ValueError(
                f"domain {name!r} is not in {root}; it has: {', '.join(present)}."
                f"{suggest(name, present)}"
            )
        chosen.append(found)
    return chosen


def _load(
    folders: Mapping[str, Path],
    classes: tuple[str, ...],
    size: int,
    aliases: Mapping[str, str],
) -> DomainData:
    if size < 1:
        raise ValueError(f"size must be at least 1 pixel, not {size}")
    spec = DataSpec("image", len(classes), (3, size, size), classes, mean=MEAN, std=STD)
    domains = {name: _load_domain(name, path, classes, size) for name, path in folders.items()}
    return DomainData(spec, domains, dict(aliases))


def _load_domain(name: str, folder: Path, classes: tuple[str, ...], size: int) -> Domain:
    samples = _samples(folder, classes)
    relative = [f"{path.relative_to(folder)}:{file_signature(path)}" for path, _ in samples]

    def fill(array: Array) -> None:
        def put(index: int) -> None:
            array[index] = decode_image(samples[index][0], size)

        # Pillow decodes and resizes outside the interpreter lock, so threads are enough.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(put, range(len(samples))):
                pass

    key = digest([size, *relative])
    shape = (len(samples), 3, size, size)
    images = cached_array(f"images-{name.replace(' ', '-')}-{size}", key, shape, np.uint8, fill)
    targets = torch.tensor([target for _, target in samples])
    return Domain(name, torch.from_numpy(np.asarray(images)), targets)


def _samples(folder: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """List the images of a domain in a fixed order, with the number of their class."""
    from torchvision.datasets import ImageFolder

    class DomainFolder(ImageFolder):  # type: ignore[misc]
        """An ImageFolder that numbers classes by the data set's list, not by its own folders."""

        def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
            numbers = {}
            for path in _folders(Path(directory)):
                found = match_name(path.name, classes)
                if found is None:
                    raise ValueError(
                        f"{path} is not one of the {len(classes)} classes: {', '.join(classes)}."
                        f"{suggest(path.name, classes)}"
                    )
                numbers[path.name] = classes.index(found)
            if not numbers:
                raise ValueError(f"{directory} has no class folders; expected <class>/<image>")
            return list(numbers), numbers

    samples = DomainFolder(str(folder), allow_empty=True).samples
    if not samples:
        raise ValueError(f"{folder} holds no images in its class folders")
    return [(Path(path), target) for path, target in samples]


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] not in "._")
