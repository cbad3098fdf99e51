"""ELCFS of FedDG (Liu et al., 2021): train on images that look as if another client had taken them.

The amplitude of an image's Fourier transform carries its look, the phase its content. Clients share
low-frequency amplitudes of some of their images. A client draws one of another client's, ``B``, and
changes its image with the transform ``A exp(i P)``, for the low frequencies ``M``, into

    A' = A  outside M,      A' = (1 - v) A + v B  in M,      v uniform in (0, 1) for every image,

so that the look goes over continuously from the client's own to the other's. The loss is the mean
of those of the batch and of the changed batch.

The publication is about segmentation, and leaves open or differs:

- *What is not here.* Its episodic training takes a step on the batch so that the changed batch
  improves after it, with a contrastive loss of features at the boundaries of organs. Boundaries
  belong to segmentation; what remains for other tasks is the mean of both losses.
- *What is shared.* The publication shares amplitudes of all images. Here a client shares those of
  ``samples`` images, evenly spaced among its own, and no frequencies but those in ``M``.
- *Low frequencies* are those of at most ``size`` times the height and the width, around zero.
- *The way.* Amplitudes go up the tree with the arrays that methods share before a round. Every
  client has a place in the array, so that a mean over clients keeps their amplitudes apart; a
  client that is away is represented by what it shared before.

Others' amplitudes may be false: negative ones count as zero, and none counts for more than ten
times the largest of the batch, so that a hostile client cannot make others diverge.

Amplitudes are statistics of single images. A deployed node sends them only if its owner allows it
(``privacy.amplitudes``), and the run says so when it starts.

Liu et al., "FedDG: Federated Domain Generalization on Medical Image Segmentation via Episodic
Learning in Continuous Frequency Space", arXiv:2103.06030.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from hfedatm.base.errors import UserError
from hfedatm.contracts import Batch, Inputs, Method, State, option

MOST_TIMES = 10.0
"""Others' amplitudes count up to this multiple of the largest in a batch of one's own."""


def low_amplitudes(images: Tensor, size: float) -> Tensor:
    """Return the low-frequency amplitudes of images, with the frequency zero in the middle."""
    rows, columns = _window(images, size)
    spectrum = torch.fft.fftshift(torch.fft.fft2(images), dim=(-2, -1))
    low: Tensor = spectrum[..., rows, columns].abs()
    return low


def interpolated(images: Tensor, others: Tensor, share: Tensor, size: float) -> Tensor:
    """Return images whose low-frequency amplitudes went ``share`` of the way to the others'."""
    rows, columns = _window(images, size)
    spectrum = torch.fft.fftshift(torch.fft.fft2(images), dim=(-2, -1))
    amplitude = spectrum.abs()
    own = amplitude[..., rows, columns]
    way = share.view(-1, *[1] * (images.ndim - 1))
    amplitude[..., rows, columns] = (1 - way) * own + way * others
    changed = torch.polar(amplitude, spectrum.angle())
    result: Tensor = torch.fft.ifft2(torch.fft.ifftshift(changed, dim=(-2, -1))).real
    return result


def _window(images: Tensor, size: float) -> tuple[slice, slice]:
    """Return the rows and columns of the low frequencies in a shifted spectrum."""
    height, width = images.shape[-2:]
    # As many below as above zero: the amplitudes of real images are symmetric, and must stay so.
    reach = [min(int(size * length), (length - 1) // 2) for length in (height, width)]
    centre = (height // 2, width // 2)
    rows, columns = (slice(c - r, c + r + 1) for c, r in zip(centre, reach, strict=True))
    return rows, columns


@dataclass
class ELCFS(Method):
    """Train on images with the low-frequency amplitudes of other clients' images, too."""

    sharing: ClassVar[Literal["none", "global", "station"]] = "global"
    reveals: ClassVar[tuple[str, ...]] = ("amplitudes",)

    size: float = option(
        0.1, "low frequencies: at most this part of height and width", ge=0, lt=0.5
    )
    samples: int = option(4, "images of each client whose amplitudes are shared", ge=1, le=64)

    def share(self, model: nn.Module, batches: Iterable[Batch]) -> State:
        """Return the amplitudes of some images, in this client's place among all clients."""
        images = torch.cat([_images(inputs) for inputs, _ in batches])
        chosen = torch.linspace(0, len(images) - 1, self.samples).round().long()
        own = low_amplitudes(images[chosen.to(images.device)].float(), self.size).cpu()
        bank = torch.zeros((self.clients, *own.shape))
        present = torch.zeros(self.clients)
        bank[self.client % self.clients] = own
        present[self.client % self.clients] = 1.0
        return {"bank": bank, "present": present}

    def blend(self, old: State, new: State) -> State:
        """Undo the weights of the mean; for clients that are away, keep what they shared before."""
        weight, bank = new["present"], new["bank"]
        here = weight > 0
        places = (-1, *[1] * (bank.ndim - 1))
        fresh = bank / weight.where(here, torch.ones_like(weight)).view(places)
        if not old:
            return {"bank": fresh * here.view(places), "present": here.float()}
        kept = torch.where(here.view(places), fresh, old["bank"])
        return {"bank": kept, "present": torch.maximum(here.float(), old["present"])}

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        """Take the amplitudes of the other clients."""
        present = shared["present"] > 0
        present[self.client % self.clients] = False
        found = shared["bank"][present].flatten(0, 1)
        # Amplitudes come from others: no number of theirs may be negative or not finite.
        self._others = found.nan_to_num(0.0, 0.0, 0.0).clamp_min(0.0)

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return the mean of the losses of the images and of the changed images."""
        plain = super().loss(model, inputs, targets)
        if not len(self._others):
            return plain
        images = _images(inputs)
        most = MOST_TIMES * low_amplitudes(images, self.size).amax()
        drawn = torch.randint(len(self._others), (len(images),))
        others = self._others[drawn].to(images).clamp_max(most)
        share = torch.rand(len(images)).to(images)
        changed = interpolated(images, others, share, self.size)
        return 0.5 * (plain + super().loss(model, changed, targets))


def _images(inputs: Inputs) -> Tensor:
    if not isinstance(inputs, Tensor) or inputs.ndim != 4:
        raise UserError(
            "client-method elcfs changes the spectra of images, and these inputs are none: choose "
            "another client-method"
        )
    return inputs
