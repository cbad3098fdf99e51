"""Pretrained weights: from a local file or folder, a package, or the Hugging Face hub.

Nothing here reaches for the network when what is named is on this machine.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfedatm_core.models.base import head_name


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


def local_folder(source: str) -> Path | None:
    """Return the folder that ``source`` names on this machine, or None for a hub id.

    ``source`` is a folder, or an installed package that carries a model in its folder ``model``.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    module = source.replace("-", "_")
    if module.isidentifier():
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            packaged = Path(spec.origin).parent / "model"
            if (packaged / "config.json").is_file():
                return packaged
    return None


def from_hub(auto_class: str, source: str, **options: Any) -> Any:
    """Call ``transformers.<auto_class>.from_pretrained`` for a local folder, a package or a hub id.

    A hub id is looked up in the local hub cache first; the network is tried only if it is not
    there and ``HF_HUB_OFFLINE`` is not set.

    Raises
    ------
    FileNotFoundError
        If there is nothing to load; the message says what to download and where to put it.
    """
    folder = local_folder(source)
    if folder is not None:
        try:
            return _load(auto_class, str(folder), local_files_only=True, **options)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"{folder} does not hold what {auto_class} needs: {_first_line(error)}\n"
                "The folder must have config.json, model.safetensors and the tokenizer's files"
            ) from error
    if source.startswith((".", "/", "~")):
        raise FileNotFoundError(_missing(source, "there is no such folder"))
    try:
        return _load(auto_class, source, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        if offline():
            raise FileNotFoundError(
                _missing(source, "it is not in the local cache and HF_HUB_OFFLINE is set")
            ) from error
    try:
        return _load(auto_class, source, **options)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(_missing(source, _first_line(error))) from error


def offline() -> bool:
    """Tell whether the user has forbidden the network (HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE)."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def _load(auto_class: str, source: str, **options: Any) -> Any:
    """Load without progress bars and reports on the weights a classifier does not use."""
    import transformers

    logging: Any = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return getattr(transformers, auto_class).from_pretrained(source, **options)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _missing(source: str, why: str) -> str:
    repository = source if not source.startswith((".", "/", "~")) else "<model>"
    return (
        f"cannot load {source!r}: {why}.\n"
        f"Get it: on a machine with a network, hf download {repository} --local-dir <folder>\n"
        "Put it: copy that folder to every node and give its path instead of the name "
        "(config.json, model.safetensors and the tokenizer's files must be in it)"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file as read

            return dict(read(file))
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the readers raise a dozen different types for a broken file
        raise ValueError(f"cannot read the weights in {file}: {_first_line(error)}") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{file} must hold a state dict, that is, tensors by name")
    return state
