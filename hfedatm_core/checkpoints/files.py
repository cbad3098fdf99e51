"""Checkpoints and Grams as files: tensors by name, read without ever unpickling an object."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hfedatm_core.grams.by_layer import pack_grams, unpack_grams
from hfedatm_core.grams.encoding import WireType
from hfedatm_core.grams.gram import Gram
from hfedatm_core.pretrained import first_line
from hfedatm_core.tensors import State
from hfedatm_files import replacing

Shapes = Mapping[str, tuple[int, ...]]

# Keys under which training tools store the weights in a file that also holds other things.
_INSIDE = ("state_dict", "model_state_dict", "model")
_OF = "measured for"


def read_state(path: Path | str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name.

    Parameters
    ----------
    path
        A ``.safetensors`` file, a file of ``torch.save`` (of which only tensors are read, never
        other objects), or a folder of Hugging Face with ``model.safetensors`` in it. The weights
        may be under the key ``state_dict``, ``model_state_dict`` or ``model``.

    Raises
    ------
    FileNotFoundError, ValueError
        There is no such file, or it holds no tensors by name.
    """
    file = find_checkpoint(path)
    try:
        loaded = load_file(file) if _is_safe(file) else _load_weights(file)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"cannot read the weights in {file}: it is damaged, or holds objects that are no "
            "tensors, which are never unpickled; save nothing but model.state_dict() in it"
        ) from error
    except Exception as error:  # for a broken file the readers raise errors of many types
        raise ValueError(f"cannot read the weights in {file}: {first_line(error)}") from error
    state: Any = loaded
    for key in _INSIDE:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{file} must hold a state dict, that is, tensors by name")
    return dict(state)


def read_shapes(path: Path | str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors, without reading their numbers if possible."""
    file = find_checkpoint(path)
    if not _is_safe(file):
        return {name: tuple(value.shape) for name, value in read_state(file).items()}
    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read the weights in {file}: {first_line(error)}") from error


def find_checkpoint(path: Path | str) -> Path:
    """Return the file that holds the weights; ``path`` may be the folder of one model."""
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"there is no checkpoint {file}")
    return file


def write_state(path: Path, state: State, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors by name: ``.safetensors``, or by ``torch.save`` for any other ending."""
    tensors = {name: value.detach().contiguous() for name, value in state.items()}
    with replacing(path) as part:
        if _is_safe(path):
            save_file(tensors, part, {"format": "pt", **(metadata or {})})
        else:
            torch.save(tensors, part)


def differences(found: Shapes, wanted: Shapes) -> list[str]:
    """Return the differences between a checkpoint's shapes and the model's, in words."""
    return [
        *(f"{key} is missing" for key in wanted if key not in found),
        *(f"{key} is not in the model" for key in found if key not in wanted),
        *(
            f"{key} has shape {tuple(found[key])}, the model needs {tuple(wanted[key])}"
            for key in wanted
            if key in found and tuple(found[key]) != tuple(wanted[key])
        ),
    ]


def fingerprint(path: Path | str) -> str:
    """Return the identity of a checkpoint: the SHA-256 of its file."""
    with find_checkpoint(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_grams(
    path: Path, grams: Mapping[str, Gram], checkpoint: Path | str, dtype: WireType = "float32"
) -> None:
    """Write the Grams that were measured for one checkpoint, with its fingerprint."""
    arrays = {n: torch.from_numpy(array) for n, array in pack_grams(grams, dtype=dtype).items()}
    with replacing(path) as part:
        save_file(arrays, part, {_OF: fingerprint(checkpoint)})


def read_grams(path: Path | str) -> tuple[dict[str, Gram], str]:
    """Return the Grams in a file and the fingerprint of the checkpoint they were measured for."""
    try:
        with safe_open(path, "np") as file:
            of = (file.metadata() or {}).get(_OF, "")
            grams = unpack_grams({name: file.get_tensor(name) for name in file.keys()})
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"cannot read the Grams in {path}: {first_line(error)}") from error
    return grams, of


def _is_safe(file: Path) -> bool:
    return file.suffix == ".safetensors"


def _load_weights(file: Path) -> Any:
    """Read a file of ``torch.save``, memory-mapped if its format allows."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # written by an old version of torch
        return torch.load(file, map_location="cpu", weights_only=True)
