"""A training function that misbehaves on the nodes a test names.

A test puts a file ``<fault>-<machine>`` into ``$FAULTS``; the machine's training does it once.
"""

import io
import os
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array

import hfedatm.base.records


def machine() -> str:
    """Name of the node this process works for: each has a state folder of its own."""
    return Path(os.environ["HFEDATM_STATE"]).parent.name


def train(model, batches, received, settings):
    faults = Path(os.environ["FAULTS"])
    with (faults / "trained").open("a") as file:
        file.write(f"{machine()}\n")
    _pause(faults / f"pause-{machine()}", faults / f"paused-{machine()}")
    if _once(faults / f"hostile-{machine()}"):
        hfedatm.base.records.write_array = _hostile
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    for inputs, targets in batches:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": float(loss)}


def _pause(wish: Path, note: Path) -> None:
    """Wait, in the training that the wish numbers, until the wish is withdrawn."""
    if not wish.exists():
        return
    number = int(wish.read_text() or 1)
    if number > 1:
        wish.write_text(str(number - 1))
        return
    note.write_text(str(os.getpid()))
    while wish.exists():
        time.sleep(0.1)


def _once(file: Path) -> bool:
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


class _Bomb:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self):
        return (open, (str(Path(os.environ["FAULTS"]) / "unpickled"), "w"))


def _hostile(value):
    """Return an array of the right shape whose bytes are a pickle."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([_Bomb()], dtype=object), allow_pickle=True)
    return Array("float32", tuple(value.shape), "numpy.ndarray", buffer.getvalue())
