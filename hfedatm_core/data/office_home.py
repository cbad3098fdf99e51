"""Office-Home (Venkateswara et al., CVPR 2017): 15,588 images, 65 classes, 4 domains."""

from collections.abc import Sequence
from pathlib import Path

from hfedatm_core.data.base import DomainData
from hfedatm_core.data.folder import FolderLayout, load_layout

DOMAINS = ("Art", "Clipart", "Product", "Real World")
CLASSES = tuple(
    """Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair
    Clipboards Computer Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops
    Flowers Folder Fork Glasses Hammer Helmet Kettle Keyboard Knives Lamp_Shade Laptop Marker
    Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil Postit_Notes Printer Push_Pin
    Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon TV Table
    Telephone ToothBrush Toys Trash_Can Webcam""".split()
)
LAYOUT = FolderLayout(
    title="Office-Home",
    folders=("office_home", "OfficeHome", "OfficeHomeDataset_10072016", "Office-Home"),
    domains=DOMAINS,
    classes=CLASSES,
    source="python -m domainbed.scripts.download (https://github.com/facebookresearch/DomainBed), "
    "or https://www.hemanthdv.org/officeHomeDataset.html",
    aliases={"A": "Art", "C": "Clipart", "P": "Product", "R": "Real World", "Real": "Real World"},
)


def load(
    data_dir: Path | str | None = None,
    *,
    size: int = 64,
    domains: str | Sequence[str] | None = None,
    classes: str | Sequence[str] | None = None,
) -> DomainData:
    """Load Office-Home from ``<data_dir>/office_home``; options as in `folder.load`."""
    return load_layout(LAYOUT, data_dir, size, domains, classes)
