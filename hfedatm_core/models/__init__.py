"""Models: one file each, found by name."""

import sys

from torch import nn

from hfedatm_core.data.base import DataSpec
from hfedatm_core.discovery import check_options, find

__all__ = ["build"]


def build(name: str, spec: DataSpec, **options: object) -> nn.Module:
    """Build a built-in model for a data set by its name (``"lenet5"``, ``"roberta-base"``, ...).

    Fresh weights come from torch's global random generator: seed it first to get the same model.

    Raises
    ------
    ValueError
        If there is no such model, or it has no such option.
    """
    function = find(sys.modules[__name__], name, "build", "model")
    check_options(function, options, f"model {name!r}", reserved=("spec",))
    model: nn.Module = function(spec, **options)
    return model
