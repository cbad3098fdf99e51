"""A data set: real handwritten digits under four lamps; each lamp is a domain."""

import torch
from sklearn.datasets import load_digits

from hfedatm.contracts import DataSpec, Domain, DomainData


def load(data_dir: str | None = None, noise: float = 0.3) -> DomainData:
    """Return 8 x 8 digits in four domains: unchanged, dim, grainy, and shifted by a pixel.

    Parameters
    ----------
    data_dir
        Where a data set would look for its files; this one has none.
    noise
        Strength of the grain.
    """
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    targets = torch.tensor(digits.target)
    grain = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    lamps = {
        "daylight": images,
        "dim": 0.4 * images,
        "grainy": images + noise * grain,
        "shaky": images.roll(1, dims=-1),
    }
    spec = DataSpec("image", num_classes=10, input_shape=(1, 8, 8))
    return DomainData(spec, {name: Domain(name, x, targets) for name, x in lamps.items()})
