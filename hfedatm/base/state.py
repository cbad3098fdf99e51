"""The tensors of a model, or tensors that accompany a model, by their names."""

from torch import Tensor

State = dict[str, Tensor]
