"""Pretrained weights of a model, from a file."""

from pathlib import Path

import torch
from torch import Tensor, nn

from hfedatm_core.models.base import head_name
from hfedatm_core.pretrained import first_line


def load_file(model: nn.Module, path: Path | str, source: str) -> None:
    """Load a state dict (.pth, .pt or .safetensors) into a model, its classifier if it fits.

    The classifier of a checkpoint made for another number of classes is left out, and the
    model keeps its fresh one. Everything else must be there and have the right shape.

    Parameters
    ----------
    model
        The model to fill.
    path
        The file.
    source
        Where to get such a file, for the error.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"there are no pretrained weights at {file}; download {source} and set "
            "pretrained=<path of that file>"
        )
    state = _read(file)
    own = model.state_dict()
    head = head_name(model)
    replaced = [f"{head}.weight", f"{head}.bias"]
    if all(key in state and state[key].shape[1:] == own[key].shape[1:] for key in replaced):
        if any(state[key].shape != own[key].shape for key in replaced):
            state |= {key: own[key] for key in replaced}
    problems = [f"{key} is missing" for key in own.keys() - state.keys()]
    problems += [f"{key} is not in the model" for key in state.keys() - own.keys()]
    problems += [
        f"{key} has shape {tuple(state[key].shape)}, the model needs {tuple(own[key].shape)}"
        for key in own.keys() & state.keys()
        if state[key].shape != own[key].shape
    ]
    if problems:
        raise ValueError(
            f"{file} does not fit {type(model).__name__} ({len(problems)} differences): "
            + "; ".join(sorted(problems)[:5])
        )
    model.load_state_dict(state)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file as read

            return dict(read(file))
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the readers raise a dozen different types for a broken file
        raise ValueError(f"cannot read the weights in {file}: {first_line(error)}") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{file} must hold a state dict, that is, tensors by name")
    return state
