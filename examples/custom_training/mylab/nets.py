"""A model: any module that takes a batch of inputs and returns logits."""

from torch import nn

from hfedatm.contracts import DataSpec


def build(spec: DataSpec, width: int = 32) -> nn.Module:
    """Return a small convolutional network; its last Linear layer is the classifier."""
    channels, height, side = spec.input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 2) * (side // 2), width),
        nn.ReLU(),
        nn.Linear(width, spec.num_classes),
    )
