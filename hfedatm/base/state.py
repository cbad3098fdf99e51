"""The tensors of a model, or of what goes with one, by their names."""

from torch import Tensor

State = dict[str, Tensor]
