"""Follow a network's operations, below its modules, without computing anything.

The model runs on fake tensors, which have shapes and no values, once in evaluation and once in
training mode. The recording sees every ATen operation, whether a module or a function called it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hfedatm_core.channels import layers, moves, moving
from hfedatm_core.channels.atoms import Atoms
from hfedatm_core.channels.calling import (
    Inputs,
    arguments,
    keeps_strides,
    slow_path,
    storage,
    tensors,
)
from hfedatm_core.channels.groups import OUTPUT, Kind
from hfedatm_core.channels.layouts import ChannelLayout, active
from hfedatm_core.channels.norms import NOTHING, Event
from hfedatm_core.channels.rules import RULES, Call, pointwise

__all__ = ["Inputs", "Recording", "layers", "moving"]  # importing the last two registers rules


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knowledge about the channels of a model, gained by following its operations.

    Attributes
    ----------
    atoms
        Which channels are identical, and which are frozen.
    used
        Layouts of the tensors of the ``state_dict`` that the model used, in the order of use.
    kept
        Layouts whose positions must be mapped onto each other: stretches of a dimension.
    writers
        Weight -> the layout it wrote and the kind of its layer, in the order of use.
    frozen
        Module -> the reason why channels that reach it are frozen.
    names
        Names of the tensors of the ``state_dict`` by the identity of their fake tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.atoms = Atoms()
        self.used: dict[str, ChannelLayout] = {}
        self.kept: list[ChannelLayout] = []
        self.writers: dict[str, tuple[ChannelLayout, Kind]] = {}
        self.frozen: dict[str, str] = {}
        self.passed: dict[
            str, list[ChannelLayout]
        ] = {}  # layouts by the module whose forward sees them
        self._stack: list[str] = [""]
        self._events: list[Event] = []
        self._same: dict[int, int] = {}  # result -> input of a module that does nothing
        self.names: dict[int, str] = {}
        self._layouts: dict[int, ChannelLayout] = {}
        self._origins: dict[int, tuple[str, ...]] = {}
        self._alive: list[Tensor] = []
        self._by_storage: dict[int, list[Tensor]] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
        # The copy shares all tensors with the model; only its structure and mode are separate.
        self._twin = copy.deepcopy(model, shared)
        self._types = {name: type(module) for name, module in model.named_modules()}
        for name, module in self._twin.named_modules():
            module.register_forward_pre_hook(self._entering(name))
            module.register_forward_hook(self._leaving, always_call=True)
        stored = set(model.state_dict(keep_vars=True))
        self._state: dict[str, Tensor] = {}
        with self._fake:
            for name, tensor in (*self._twin.named_parameters(), *self._twin.named_buffers()):
                fake = self._fake.from_tensor(tensor.detach())
                self._state[name] = fake
                self._alive.append(fake)
                if name in stored:
                    self.names[id(fake)] = name

    def run(self, inputs: Inputs, training: bool) -> list[Event]:
        """Follow the model in one mode; errors of the model's forward are passed on."""
        try:
            self._run(inputs, training, 1)
        except ValueError:
            if not training:
                raise
            self._run(inputs, training, 2)  # BatchNorm in training refuses a single example
        return self._events

    def _run(self, inputs: Inputs, training: bool, copies: int) -> None:
        self._stack, self._events, self._same = [""], [], {}
        self._twin.train(training)
        with ExitStack() as stack:
            for context in (
                self._fake,
                torch.no_grad(),
                sdpa_kernel(SDPBackend.MATH),
                slow_path(),
            ):
                stack.enter_context(context)
            fakes = pytree.tree_map_only(
                Tensor, lambda t: self._input(t, copies), arguments(inputs)
            )
            with self:
                result = torch.func.functional_call(self._twin, self._state, *fakes)
        for tensor in tensors(result):
            self.atoms.freeze(self._layout_of(tensor), OUTPUT)
            self._log("output", {}, [tensor], [])

    # --- one operation -------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the shapes of an operation's results and their layouts."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.as_strided_.default and keeps_strides(*args):
            return func(*args, **kwargs)  # only the strides of dimensions of size one change
        returned = func(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        if results or func._schema.is_mutable:
            self._follow(func, args, kwargs, results)
        return returned

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], results: list[Tensor]) -> None:
        given = {
            argument.name: args[place]
            if place < len(args)
            else kwargs.get(argument.name, argument.default_value)
            for place, argument in enumerate(func._schema.arguments)
        }
        operands = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        name = func._overloadpacket.__name__
        self._log(name, given, operands, results)
        in_place = name.endswith("_") and not name.startswith("__")
        rule = RULES.get(name.removesuffix("_") if in_place else name)
        if rule is None and torch.Tag.pointwise in func.tags:
            rule = pointwise
        call = Call(
            *(self.atoms, given, results, self._where(name)),
            *(self._layout_of, self._keep, self._wrote),
        )
        found = rule(call) if rule is not None and func.namespace == "aten" else None
        if found is None:
            self._unknown(name, func._schema.is_mutable, operands, results)
            return
        layouts = list(found) if isinstance(found, list) else [found] * len(results)
        origins = self._origin(operands)
        for result, layout in zip(results, layouts, strict=True):
            if in_place and any(result is operand for operand in operands):
                self._overwrite(result, layout, operands)
            else:
                self._remember(result, layout)
                if origins:
                    self._origins[id(result)] = origins

    def _unknown(
        self, name: str, mutable: bool, operands: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Freeze all channels that an operation touches."""
        reason = f"{self._where(name)} is not understood"
        fresh = [
            self.atoms.freeze(self._layout_of(tensor), f"its channels reach {reason}")
            for tensor in operands
        ]
        if any(fresh) and self._stack[-1]:
            self.frozen.setdefault(self._stack[-1], reason)
        for tensor in (*operands, *results) if mutable else results:
            self._fix(tensor)

    def _overwrite(self, tensor: Tensor, layout: ChannelLayout, operands: Sequence[Tensor]) -> None:
        before = self._layout_of(tensor)
        after = self.atoms.unite(before, layout, tensor.shape, "it is overwritten")
        gained = {d for c in after for d in active(c)} - {d for c in before for d in active(c)}
        self._layouts[id(tensor)] = after
        if gained and len(self._by_storage[storage(tensor)]) > 1:
            # Another tensor, possibly a larger one, uses the same memory.
            for operand in operands:
                self.atoms.freeze(self._layout_of(operand), f"it is a part of {self._where('')}")
            for alias in self._by_storage[storage(tensor)]:
                self._fix(alias)

    # --- knowledge about tensors ---------------------------------------------------------------

    def _layout_of(self, tensor: Tensor) -> ChannelLayout:
        if id(tensor) not in self._layouts:
            name = self.names.get(id(tensor))
            fixed = name is None
            layout = self.atoms.fixed(tensor.shape) if fixed else self.atoms.fresh(tensor.shape)
            self._remember(tensor, layout)
            if name is not None:
                self.used[name] = layout
                self._origins[id(tensor)] = (name,)
        return self._layouts[id(tensor)]

    def _remember(self, tensor: Tensor, layout: ChannelLayout) -> None:
        if id(tensor) not in self._layouts:
            self._alive.append(tensor)  # otherwise a new tensor may get its identity
            self._by_storage.setdefault(storage(tensor), []).append(tensor)
        self._layouts[id(tensor)] = layout
        self.passed.setdefault(self._stack[-1], []).append(layout)

    def _fix(self, tensor: Tensor) -> None:
        for alias in self._by_storage.get(storage(tensor), []):
            self.atoms.freeze(self._layout_of(alias), "it is overwritten")
            self._layouts[id(alias)] = self.atoms.fixed(alias.shape)
        if id(tensor) not in self._layouts:
            self._remember(tensor, self.atoms.fixed(tensor.shape))

    def _origin(self, operands: Sequence[Tensor]) -> tuple[str, ...]:
        """Return the weights that a result was computed from; empty if also from other tensors."""
        names = [self._origins.get(id(tensor), ()) for tensor in operands]
        return tuple(dict.fromkeys(sum(names, ()))) if names and all(names) else ()

    def _keep(self, layout: ChannelLayout) -> None:
        self.atoms.tell_apart(layout)
        sizes = [max(c.shape[d] for c in layout) for d in range(layout[0].ndim)]
        self.kept.append(moves.flat(layout, sizes))

    def _wrote(self, tensor: Tensor, layout: ChannelLayout, kind: Kind) -> None:
        for name in self._origins.get(id(tensor), ()):
            if name == self.names.get(id(tensor)) or self._state[name][0].numel() > 1:
                self.writers.setdefault(name, (layout, kind))

    def _log(
        self,
        name: str,
        arguments: Mapping[str, Any],
        operands: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> None:
        if not self._in_nothing():
            read = tuple(self._same.get(id(tensor), id(tensor)) for tensor in operands)
            self._events.append(Event(name, arguments, read, tuple(map(id, results))))

    # --- the current module --------------------------------------------------------------------

    def _where(self, operation: str) -> str:
        module = self._stack[-1]
        if not module:
            return f"{operation} of the whole network"
        return f"{operation} in {module} ({self._types[module].__name__})"

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(name)

        return enter

    def _in_nothing(self) -> bool:
        return issubclass(self._types.get(self._stack[-1], object), NOTHING)

    def _leaving(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._in_nothing() and args and result is not args[0]:
            self._same[id(result)] = self._same.get(id(args[0]), id(args[0]))
        self._stack.pop()
        layouts = (self._layouts.get(id(tensor)) for tensor in tensors(result))
        self.passed.setdefault(self._stack[-1], []).extend(filter(None, layouts))

    def _input(self, tensor: Tensor, copies: int) -> Tensor:
        fake = self._fake.from_tensor(tensor)
        return torch.cat([fake] * copies) if copies > 1 and fake.dim() else fake
