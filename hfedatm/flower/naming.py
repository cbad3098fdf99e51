"""Give another app's arrays the names of the model's tensors, and back."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from hfedatm_core.tensors import State


def named_as(record: ArrayRecord, model: State) -> dict[str, Tensor]:
    """Return the arrays under the model's names.

    The arrays may have any memory layout. They already have the model's names, as in
    ``ArrayRecord(net.state_dict())``, or are numbered in the order of the ``state_dict``, as in an
    ArrayRecord of a list of arrays.

    Raises
    ------
    ValueError
        No array belongs to the model.
    """
    # Copies, because arrays of a message may be read-only.
    arrays = {n: torch.from_numpy(np.array(a.numpy(), order="C")) for n, a in record.items()}
    numbered = all(name.isdigit() for name in arrays)
    if numbered and [v.shape for v in arrays.values()] == [v.shape for v in model.values()]:
        return dict(zip(model, arrays.values(), strict=True))
    known = [n for n, v in arrays.items() if n in model and v.shape == model[n].shape]
    if not known:
        raise ValueError(
            "the arrays have neither the names of the model's tensors nor their order and shapes"
        )
    return arrays
