"""Frozen weights between trained ones: a network uses them, but does not show them.

A hidden tensor is not in the network's ``state_dict``, so whatever is done to a state (sent,
checked, averaged, merged, saved) is done to the trained tensors alone. The network keeps its hidden
tensors when a state is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


class _Hide:
    """A hook, which can be copied and pickled with its module."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
    ) -> None:
        for name in self.names:
            state.pop(prefix + name, None)


class _Spare:
    """A hook: hidden tensors may be missing in a state that is loaded."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def __call__(self, module: nn.Module, keys: Any) -> None:
        # In a module of another module, keys begin with the path to it.
        keys.missing_keys[:] = [k for k in keys.missing_keys if not self._is_hidden(k)]

    def _is_hidden(self, key: str) -> bool:
        parts = key.split(".")
        return any(".".join(parts[start:]) in self.names for start in range(len(parts)))


def _stay(module: nn.Module, args: object) -> None:
    module.eval()


def frozen_names(model: nn.Module, trained: Iterable[str]) -> set[str]:
    """Return the tensors that stay as they are if the modules ``trained`` are trained.

    They are the weights of the other modules, and the statistics beside such weights.
    """
    prefixes = tuple(f"{name}." for name in trained)
    found = set()
    for path, module in model.named_modules():
        own = [
            f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)
        ]
        if own and not own[0].startswith(prefixes):
            buffers = [name for name, _ in module.named_buffers(recurse=False)]
            found |= set(own) | {f"{path}.{name}" if path else name for name in buffers}
    return found


def hide(model: nn.Module, trained: Iterable[str]) -> nn.Module:
    """Freeze and hide everything besides the modules ``trained``; return the same network.

    A BatchNorm with hidden statistics stays in evaluation mode.
    """
    names = frozen_names(model, trained) & set(model.state_dict())
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
    if not names:
        return model
    for path, module in model.named_modules():
        if isinstance(module, _NormBase) and f"{path}.running_mean" in names:
            module.register_forward_pre_hook(_stay)
    model.register_state_dict_post_hook(_Hide(names))  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(_Spare(names))  # type: ignore[no-untyped-call]
    return model


def hidden_names(model: nn.Module) -> set[str]:
    """Return the names of the hidden tensors."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for hook in module._state_dict_hooks.values()
        if isinstance(hook, _Hide)
        for name in hook.names
    }
