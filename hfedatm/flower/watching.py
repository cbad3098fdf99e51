"""Record the inputs of a network while another app's function trains it.

A mod does not see the user's network. While the training function runs, hooks that torch calls for
every module find the outermost modules that are trained, and keep the last inputs they were called
with. Afterwards those inputs are passed through the trained network once more, in evaluation mode.
"""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from threading import get_ident
from typing import Any

import numpy as np
import torch
from flwr.app import Array
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree

from hfedatm_core import Batch, Inputs
from hfedatm_core.checkpoints.fitting import shapes_of

_WRAPPERS = re.compile(r"^(?:(?:module|_module|_orig_mod)\.)+")


class Watched:
    """A trained network, the names of its layers, and its last inputs."""

    def __init__(self, network: nn.Module, names: Mapping[str, str]) -> None:
        self.network = network
        self.names = names
        self.calls = 0
        self.kept: deque[tuple[Inputs, int]] = deque()
        self._bytes = 0

    def keep(self, inputs: Inputs, most_bytes: int) -> None:
        """Keep these inputs, and as many of the earlier inputs as there is room for."""
        leaves = pytree.tree_leaves(inputs)
        size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        self.kept.append((inputs, size))
        self._bytes += size
        while len(self.kept) > 1 and self._bytes > most_bytes:
            self._bytes -= self.kept.popleft()[1]

    def batches(self) -> Iterator[Batch]:
        """Yield the inputs that were kept."""
        for inputs, _ in self.kept:
            yield inputs, None


class TrainingWatch:
    """Watch the training that this thread does inside the ``with`` block.

    Parameters
    ----------
    arrays
        The weights that the server sent for the trained network, by name or number.
    most_bytes
        Most bytes of inputs to keep for each network; newer inputs replace older ones.
    """

    def __init__(self, arrays: Mapping[str, Array], most_bytes: int) -> None:
        self._arrays = arrays
        self._most = most_bytes
        self._found: dict[int, Watched] = {}
        self._inner: set[int] = set()
        self._thread = get_ident()

    def __enter__(self) -> TrainingWatch:
        """Start to watch."""
        self._handles = [
            hooks.register_module_forward_pre_hook(self._entered),
            hooks.register_module_forward_hook(self._left, with_kwargs=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    @property
    def networks(self) -> list[Watched]:
        """The trained parts of the server's network; the part that was called most comes first.

        There are several if parts of the network are called separately, or if a teacher trains
        beside it.
        """
        found = (w for w in self._found.values() if w.kept and w.names)
        return sorted(found, key=lambda watched: -watched.calls)

    def _entered(self, module: nn.Module, _: Any) -> None:
        if not self._counts(module) or id(module) in self._inner or id(module) in self._found:
            return
        if next(module.parameters(), None) is not None:  # a loss function has none
            self._found[id(module)] = Watched(module, layer_names(module, self._arrays))
            self._inner |= {id(part) for part in module.modules() if part is not module}

    def _left(self, module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        watched = self._found.get(id(module))
        if watched is None or not self._counts(module):
            return
        watched.calls += 1
        inputs = _inputs(module, args, kwargs)
        if inputs is not None:
            watched.keep(inputs, self._most)

    def _counts(self, module: nn.Module) -> bool:
        """Return whether this call trains: evaluation inside a training function does not count."""
        return module.training and torch.is_grad_enabled() and get_ident() == self._thread


def layer_names(network: nn.Module, arrays: Mapping[str, Array]) -> dict[str, str]:
    """Return layer -> its name among ``arrays``, for the layers with a weight matrix there.

    The network may be only a part of the model in the arrays (``self.model`` of a LightningModule),
    or be wrapped; the arrays may be numbered instead of named. If names and shapes fit several
    parts equally, the values decide: before its first step a part holds the weights that the server
    sent.
    """
    own = shapes_of(network.state_dict())
    plain = {name: _WRAPPERS.sub("", name) for name in own}
    matrices = [n for n, s in own.items() if n.rpartition(".")[2] == "weight" and len(s) >= 2]
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    if list(shapes.values()) == list(own.values()) and all(name.isdigit() for name in arrays):
        return {_layer(n): _layer(plain[n]) for n in matrices}
    found = []
    for prefix in _prefixes([plain[n] for n in matrices], arrays):
        named = {n: prefix + plain[n] for n in matrices if shapes.get(prefix + plain[n]) == own[n]}
        found.append(named)
    most = max(map(len, found), default=0)
    best = [named for named in found if len(named) == most and most]
    if len(best) > 1:
        state = network.state_dict()
        best = [b for b in best if all(_holds(state[n], arrays[name]) for n, name in b.items())]
    return {_layer(n): _layer(name) for n, name in best[0].items()} if len(best) == 1 else {}


def _layer(weight: str) -> str:
    return weight.rpartition(".")[0]


def _holds(weight: Tensor, array: Array) -> bool:
    return bool(np.array_equal(weight.detach().cpu().numpy(), array.numpy()))


def _prefixes(names: list[str], arrays: Iterable[str]) -> set[str]:
    """Return the prefixes that these names may have in ``arrays``."""
    ends = {"." + name: name for name in names}
    some = {name[: -len(n)] for name in arrays for end, n in ends.items() if name.endswith(end)}
    return some | {""}


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs | None:
    """Return a network's inputs: its one tensor, or all arguments by name."""
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
        return args[0].detach()
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    spread = bound.pop("kwargs", {})
    if "args" in bound:
        return None
    named = {**bound, **(spread if isinstance(spread, Mapping) else {})}
    return {n: v.detach() if isinstance(v, Tensor) else v for n, v in named.items()}
