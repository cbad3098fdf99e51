"""PACS (Li et al., ICCV 2017): 9,991 images of 7 classes as art, cartoon, photo and sketch."""

from collections.abc import Sequence
from pathlib import Path

from hfedatm_core.data.base import DomainData
from hfedatm_core.data.folder import FolderLayout, load_layout

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
LAYOUT = FolderLayout(
    title="PACS",
    folders=("PACS", "pacs", "kfold"),
    domains=DOMAINS,
    classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
    source="python -m domainbed.scripts.download (https://github.com/facebookresearch/DomainBed), "
    "or https://domaingeneralization.github.io/#data",
    aliases={
        "art": "art_painting",
        "A": "art_painting",
        "C": "cartoon",
        "P": "photo",
        "S": "sketch",
    },
)


def load(
    data_dir: Path | str | None = None,
    *,
    size: int = 64,
    domains: str | Sequence[str] | None = None,
    classes: str | Sequence[str] | None = None,
) -> DomainData:
    """Load PACS from ``<data_dir>/PACS``; options as in `folder.load`."""
    return load_layout(LAYOUT, data_dir, size, domains, classes)
