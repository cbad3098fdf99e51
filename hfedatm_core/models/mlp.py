"""A multi-layer perceptron for vectors: tables, or the features of a frozen network."""

from torch import nn

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import require_kind


def build(spec: DataSpec, *, hidden: int = 128, layers: int = 1) -> nn.Module:
    """Build Linear layers with ReLU between them.

    Parameters
    ----------
    spec
        The data; vectors.
    hidden
        Width of the hidden layers.
    layers
        Number of hidden layers; 0 is a linear classifier.
    """
    require_kind(spec, "vector", "mlp")
    if hidden < 1 or layers < 0:
        raise ValueError(f"mlp needs hidden >= 1 and layers >= 0, not {hidden} and {layers}")
    widths = [*spec.input_shape, *[hidden] * layers]
    modules: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules, nn.Linear(widths[-1], spec.num_classes))
