"""LeNet-5 (LeCun et al., 1998) with ReLU and max-pooling; about 60,000 parameters."""

from collections import OrderedDict

from torch import nn

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import require_kind, scaled


def build(spec: DataSpec, *, batch_norm: bool = False, width: float = 1.0) -> nn.Module:
    """Build LeNet-5: 6 and 16 filters of 5x5, then 120 and 84 hidden units.

    The classic input is 32x32. Maps of another size are pooled to the classic 5x5 before the
    fully connected layers, so the number of parameters does not depend on the image size.

    Parameters
    ----------
    spec
        The data; images of at least 16x16 pixels.
    batch_norm
        Put a BatchNorm behind each convolution.
    width
        Multiplies the numbers of filters and hidden units.
    """
    require_kind(spec, "image", "lenet5")
    channels, *size = spec.input_shape
    if min(size) < 16:
        raise ValueError(f"lenet5 needs images of at least 16x16 pixels, not {size[0]}x{size[1]}")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    first, second, third, fourth = (scaled(size, width) for size in (6, 16, 120, 84))
    for number, (inputs, outputs) in enumerate(((channels, first), (first, second)), start=1):
        layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, 5)
        if batch_norm:
            layers[f"norm{number}"] = nn.BatchNorm2d(outputs)
        layers[f"relu{number}"] = nn.ReLU()
        layers[f"pool{number}"] = nn.MaxPool2d(2)
    layers["resize"] = nn.AdaptiveAvgPool2d(5)
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(second * 5 * 5, third)
    layers["relu3"] = nn.ReLU()
    layers["fc2"] = nn.Linear(third, fourth)
    layers["relu4"] = nn.ReLU()
    layers["fc3"] = nn.Linear(fourth, spec.num_classes)
    return nn.Sequential(layers)
