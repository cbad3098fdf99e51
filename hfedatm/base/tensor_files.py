"""Models in files: safetensors with a digest, so that a damaged file is never taken for a model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from hfedatm.base.errors import UserError
from hfedatm.base.text import printable
from hfedatm_files import PRIVATE, replacing

if TYPE_CHECKING:
    from torch import nn

    from hfedatm_core.tensors import State

DIGEST = "sha256"
"""Key of the metadata that holds the digest of the tensors; older files have none."""


def save_tensors(path: Path, state: State, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a file, with their digest; the file appears whole or not at all."""
    from safetensors.torch import save_file

    whole = {name: tensor.contiguous() for name, tensor in state.items()}
    with replacing(path, mode=PRIVATE) as part:
        save_file(whole, part, {**(metadata or {}), DIGEST: _digest(whole)})


def read_tensors(path: Path) -> tuple[State, dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file; refuse a damaged one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        meta = read_metadata(path)
        state = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, MemoryError) as error:
        raise UserError(f"{path} cannot be read: {printable(error)}") from None
    if DIGEST in meta and meta[DIGEST] != _digest(state):
        raise UserError(f"{path} cannot be read: it is damaged, its tensors have changed")
    return state, meta


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file without its tensors."""
    # late: commands that only read a run's JSON, such as `hfedatm watch`, do not wait for torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {printable(error)}") from None


def load_weights(model: nn.Module, state: State, path: Path) -> None:
    """Give a model the weights that were read from a file."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(
            f"{path} does not fit the model; has its code changed since, or is it of another run? "
            f"{error}"
        ) from None


def _digest(state: State) -> str:
    import torch

    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
