"""What is known of an architecture: its channel graph, its tensors, and the order of its layers."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.inputs import Inputs, forward
from hfedatm_core.tensors import State


@dataclass(frozen=True, eq=False)
class Architecture:
    """A network without regard to its weights.

    Attributes
    ----------
    model
        Any network of this architecture; it is not modified.
    example
        An example input.
    graph
        Its channel groups.
    name
        How messages call it.
    """

    model: nn.Module
    example: Inputs
    graph: ChannelGraph
    name: str = "the network"

    @classmethod
    def of(cls, model: nn.Module, example: Inputs, name: str = "the network") -> Architecture:
        """Trace a network."""
        inputs = tuple(example.values()) if isinstance(example, dict) else (example,)
        return cls(model, example, ChannelGraph.trace(model, inputs), name)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors."""
        return {name: tuple(value.shape) for name, value in self.model.state_dict().items()}

    @cached_property
    def places(self) -> dict[str, tuple[Any, ...]]:
        """Every module with tensors of its own -> its place: stage, kind, number in the stage.

        A stage is a stretch of the forward pass in which maps keep their size; in VGG, the layers
        between two poolings. Layers whose output is no map are a stage of their own.
        """
        model = copy.deepcopy(self.model).eval()
        sizes: dict[str, tuple[int, ...]] = {}

        def note(name: str) -> Any:
            def hook(_: nn.Module, __: Any, output: Any) -> None:
                if isinstance(output, Tensor):
                    sizes.setdefault(name, tuple(output.shape[2:]))

            return hook

        for name, module in model.named_modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if own:
                module.register_forward_hook(note(name))
        with torch.no_grad():
            forward(model, self.example)
        stages: dict[tuple[int, ...], int] = {}
        counts: Counter[tuple[Any, ...]] = Counter()
        found: dict[str, tuple[Any, ...]] = {}
        modules = dict(model.named_modules())
        for name, size in sizes.items():
            stage = stages.setdefault(size, len(stages)) if size else -1
            kind = (stage, type(modules[name]).__name__)
            found[name] = (*kind, counts[kind])
            counts[kind] += 1
        return found

    def outputs(self, state: State, inputs: Inputs) -> Tensor:
        """Return what the network computes with these weights in evaluation mode, in float64."""
        model = copy.deepcopy(self.model).double().eval()
        model.load_state_dict(state)
        given = inputs
        if isinstance(inputs, Tensor) and inputs.is_floating_point():
            given = inputs.double()
        with torch.no_grad():
            result: Tensor = forward(model, given)
        return result
