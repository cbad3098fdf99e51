"""Data sets with domains: one file each, found by name."""

import sys
from pathlib import Path

from hfedatm_core.data.base import (
    Batch,
    DataSpec,
    Domain,
    DomainData,
    Inputs,
    batches,
    concat,
)
from hfedatm_core.discovery import check_options, find

__all__ = ["Batch", "DataSpec", "Domain", "DomainData", "Inputs", "batches", "concat", "load"]


def load(name: str, data_dir: Path | str | None = None, **options: object) -> DomainData:
    """Load a built-in data set by its name (``"digits"``, ``"office-home"``, ...).

    Raises
    ------
    ValueError
        If there is no such data set, or it has no such option.
    """
    function = find(sys.modules[__name__], name, "load", "data set")
    check_options(function, options, f"data set {name!r}", reserved=("data_dir",))
    data: DomainData = function(data_dir, **options)
    return data
