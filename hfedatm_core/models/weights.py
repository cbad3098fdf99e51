"""Pretrained weights of a model, from a file."""

from pathlib import Path

from torch import nn

from hfedatm_core.checkpoints.files import differences, read_state
from hfedatm_core.checkpoints.fitting import shapes_of
from hfedatm_core.models.base import head_name


def load_file(model: nn.Module, path: Path | str, source: str) -> None:
    """Load a state dict (.pth, .pt or .safetensors) into a model, the classifier only if it fits.

    If the checkpoint was made for another number of classes, its classifier is ignored and the
    model keeps its fresh one. All other tensors must exist and have the right shape.

    Parameters
    ----------
    model
        The model to fill.
    path
        The file.
    source
        Where to get such a file, for the error.
    """
    if not isinstance(path, Path | str):  # such as pretrained=true
        raise ValueError(
            f"pretrained must be the path of a file, not {path!r}: download {source} and set "
            "pretrained=<path of that file>"
        )
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"there are no pretrained weights at {file}; download {source} and set "
            "pretrained=<path of that file>"
        )
    state = read_state(file)
    own = model.state_dict()
    head = head_name(model)
    replaced = [f"{head}.weight", f"{head}.bias"]
    if all(key in state and state[key].shape[1:] == own[key].shape[1:] for key in replaced):
        if any(state[key].shape != own[key].shape for key in replaced):
            state |= {key: own[key] for key in replaced}
    problems = differences(shapes_of(state), shapes_of(own))
    if problems:
        raise ValueError(
            f"{file} does not fit {type(model).__name__} ({len(problems)} differences): "
            + "; ".join(sorted(problems)[:5])
        )
    model.load_state_dict(state)
