"""Terra Incognita (Beery et al., ECCV 2018): camera-trap images, 10 classes, 4 locations."""

from collections.abc import Sequence
from pathlib import Path

from hfedatm_core.data.base import DomainData
from hfedatm_core.data.folder import FolderLayout, load_layout

DOMAINS = ("location_38", "location_43", "location_46", "location_100")
CLASSES = (
    "bird",
    "bobcat",
    "cat",
    "coyote",
    "dog",
    "empty",
    "opossum",
    "rabbit",
    "raccoon",
    "squirrel",
)
LAYOUT = FolderLayout(
    title="Terra Incognita",
    folders=("terra_incognita", "TerraIncognita"),
    domains=DOMAINS,
    classes=CLASSES,
    source="python -m domainbed.scripts.download (https://github.com/facebookresearch/DomainBed), "
    "which makes this folder from https://lila.science/datasets/caltech-camera-traps",
    aliases={f"L{name.removeprefix('location_')}": name for name in DOMAINS},
)


def load(
    data_dir: Path | str | None = None,
    *,
    size: int = 64,
    domains: str | Sequence[str] | None = None,
    classes: str | Sequence[str] | None = None,
) -> DomainData:
    """Load Terra Incognita from ``<data_dir>/terra_incognita``; options as in `folder.load`."""
    return load_layout(LAYOUT, data_dir, size, domains, classes)
