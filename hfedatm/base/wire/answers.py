"""Read the answers of an exchange: what `read_update` checks, and what no data could give."""

from __future__ import annotations

import torch
from flwr.app import Message

from hfedatm.base.exchange import GROUPS, MOMENTS, RESIDUAL, AskedLayers
from hfedatm.base.records import BadReply
from hfedatm.base.wire.expected import Expected
from hfedatm.base.wire.replies import NodeUpdate, read_update

_ROUNDING = 1e-9
"""Error of a variance that is the difference of two means, relative to the larger of them."""
_ROUNDED = 0.02
"""Relative error of the diagonal of a Gram of 16 bits, twice what rounding causes."""
_LOST = 1e-3
"""Largest entry of a Gram's diagonal that its type may lose, as a share of the mean entry."""


def read_answers(message: Message, expected: Expected, asked: AskedLayers) -> NodeUpdate:
    r"""Read a reply to one exchange.

    A client's residuals must fit its Gram and its errors: :math:`R_{ij}^2 \le E r_i^2\, G_{jj}`
    (Cauchy and Schwarz). A station may have cut back each of them by another factor.
    """
    update = read_update(message, expected)
    for name in asked.widths:
        mean, second, error = update.state[f"{name}/{MOMENTS}"]
        allowed = _ROUNDING * (second.abs() + mean.square())
        if bool((second - mean.square() < -allowed).any()) or bool((error < 0).any()):
            raise BadReply(f"answers: {name} has a negative variance or error")
        if name in asked.groups:
            blocks = update.state[f"{name}/{GROUPS}"]
            _check_blocks(blocks, name)
            diagonal = torch.diagonal(blocks, dim1=1, dim2=2).double()
            diagonal = diagonal.repeat_interleave(len(error) // len(diagonal), dim=0)
        else:
            diagonal = update.grams[name].diagonal().double()[None]
        if expected.tier == "client":
            most = error[:, None] * (diagonal + _LOST * diagonal.mean()) * (1 + _ROUNDED)
            residual = update.state[f"{name}/{RESIDUAL}"].double()
            if bool((residual.square() > most + torch.finfo(torch.float32).tiny).any()):
                raise BadReply(f"answers: {name} has residuals beyond its errors and its Gram")
    return update


def _check_blocks(blocks: torch.Tensor, name: str) -> None:
    """Refuse matrices of a convolution in groups that cannot be Grams."""
    size = float(torch.diagonal(blocks, dim1=1, dim2=2).abs().max())
    skew = float((blocks - blocks.transpose(1, 2)).abs().max())
    # Sums of float32 over many rows are right to five digits.
    if skew > 1e-4 * size or float(torch.linalg.eigvalsh(blocks.double()).min()) < -1e-4 * size:
        raise BadReply(f"answers: the Grams of {name} are not positive semi-definite")
