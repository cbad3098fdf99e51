"""A client method that wraps another one, so that a server rule can add to local training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from hfedatm.contracts.method import Method
from hfedatm_core.channels.index_maps import Follows
from hfedatm_core.data import Batch, Inputs
from hfedatm_core.tensors import State


@dataclass
class Wrapper(Method):
    """Delegate everything to ``inner``; a subclass overrides the hooks it adds to.

    The wrapper's arrays are sent and kept beside those of the inner method, under names that begin
    with ``prefix``.
    """

    prefix: ClassVar[str]
    own_reveals: ClassVar[tuple[str, ...]] = ()
    """What the wrapper itself sends, beside what the inner method `reveals`."""

    inner: Method

    def __post_init__(self) -> None:
        """Share at the tier where the inner method shares, and reveal what either reveals."""
        self.sharing = self.inner.sharing  # type: ignore[misc]
        self.reveals = (*self.inner.reveals, *self.own_reveals)  # type: ignore[misc]

    def own(self, arrays: State) -> State:
        """Return the wrapper's arrays among these, without the prefix."""
        start = len(self.prefix)
        return {n[start:]: value for n, value in arrays.items() if n.startswith(self.prefix)}

    def marked(self, arrays: State) -> State:
        """Return the wrapper's arrays under their prefixed names."""
        return {self.prefix + name: value for name, value in arrays.items()}

    def others(self, arrays: State) -> State:
        """Return the inner method's arrays among these."""
        return {n: value for n, value in arrays.items() if not n.startswith(self.prefix)}

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return the network the inner method trains."""
        return self.inner.adapt(model)

    def share(self, model: nn.Module, batches: Iterable[Batch]) -> State:
        """Return the arrays that the inner method shares."""
        return self.inner.share(model, batches)

    def blend(self, old: State, new: State) -> State:
        """Blend as the inner method does."""
        return {
            **self.inner.blend(self.others(old), self.others(new)),
            **self.marked(self.own(new)),
        }

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        """Set up the inner method with its own arrays."""
        self.inner.begin(model, self.others(shared), self.others(memory))

    def parameters(self) -> list[nn.Parameter]:
        """Return the inner method's private parameters."""
        return self.inner.parameters()

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return the inner method's loss."""
        return self.inner.loss(model, inputs, targets)

    def correct(self, model: nn.Module) -> None:
        """Change gradients as the inner method does."""
        self.inner.correct(model)

    def finish(self, model: nn.Module, validation: Iterable[Batch]) -> None:
        """Finish as the inner method does."""
        self.inner.finish(model, validation)

    def remember(self) -> State:
        """Keep the tensors that the inner method keeps."""
        return self.inner.remember()

    def follows(self, model: nn.Module) -> Follows:
        """Return the axes that the inner method lists; the wrapper's own names have a prefix."""
        return self.inner.follows(model)

    def metrics(self) -> dict[str, float]:
        """Report the numbers that the inner method reports."""
        return self.inner.metrics()
