"""Tell the digit from the background, pixel by pixel, at an angle that was never seen."""

import torch
import torch.nn.functional as F
from torch import nn

from hfedatm.contracts import BadTargets, DataSpec, Domain, DomainData, LearningTask
from hfedatm_core.data import digits

INK = 128


class Segmentation(LearningTask):
    """A class for each pixel; an example's score is its mean intersection over union."""

    measure = "mean IoU"

    @property
    def output_shape(self):
        """Scores of all classes, for each pixel."""
        return self.spec.num_classes, *self.spec.input_shape[1:]

    def losses(self, outputs, targets):
        """Return the cross-entropy of each example, the mean over its pixels."""
        return F.cross_entropy(outputs, targets, reduction="none").mean((1, 2))

    def scores(self, outputs, targets):
        """Return for each example the mean over the classes that occur in it."""
        count = self.spec.num_classes
        found, there = (F.one_hot(x, count).bool() for x in (self.predict(outputs), targets))
        both, either = (found & there).sum((1, 2)), (found | there).sum((1, 2))
        return (both / either.clamp(min=1)).sum(1) / (either > 0).sum(1)

    def predict(self, outputs):
        """Return the class of each pixel."""
        return outputs.argmax(1)

    def check(self, targets):
        """Refuse targets without a class for each pixel."""
        shape, count = self.spec.input_shape[1:], self.spec.num_classes
        if targets.dtype != torch.long or targets.shape[1:] != shape:
            raise BadTargets(f"targets must be torch.long of shape (examples, *{shape})")
        if int(targets.min()) < 0 or int(targets.max()) >= count:
            raise BadTargets(f"a pixel's class is none of 0 … {count - 1}")

    def example(self, count=2):
        """Return made-up targets: background."""
        return torch.zeros(count, *self.spec.input_shape[1:], dtype=torch.long)


def load(data_dir=None, *, noise=60.0):
    """Return grainy images of the rotated digits, and which pixels are ink."""
    make = torch.Generator().manual_seed(0)
    domains = {}
    for name, clean in digits.load(size=16).domains.items():
        pixels = clean.inputs.float()
        grain = noise * torch.randn(pixels.shape, generator=make)
        inputs = (pixels + grain).clamp(0, 255).to(torch.uint8)
        domains[name] = Domain(name, inputs, (clean.inputs[:, 0] > INK).long())
    names = ("background", "ink")
    return DomainData(DataSpec("image", 2, (1, 16, 16), names, mean=(0.5,), std=(0.5,)), domains)


def build(spec, width=12):
    """Return a network that keeps the size of the image."""
    return nn.Sequential(
        *(nn.Conv2d(spec.input_shape[0], width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
        nn.Conv2d(width, spec.num_classes, 1),
    )
