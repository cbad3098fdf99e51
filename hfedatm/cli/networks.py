"""Options that name a network, and the network or the batches they name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfedatm.base.errors import UserError

if TYPE_CHECKING:
    from hfedatm_core import Batch
    from hfedatm_core.checkpoints import Network

Model = Annotated[
    str,
    typer.Option(
        help="torchvision:NAME, timm:NAME, transformers:FOLDER or package.module:function."
    ),
]
Shape = Annotated[
    str,
    typer.Option("--input", help="Shape of one example, such as 3x32x32; default: the model's."),
]


def open_like(model: str, shape: str, checkpoint: Path) -> Network:
    """Build the network that is named, with the number of classes of a checkpoint."""
    from hfedatm_core.checkpoints import open_network
    from hfedatm_core.checkpoints.files import read_shapes

    return open_network(source_of(model, "--model"), parse_shape(shape), read_shapes(checkpoint))


def source_of(model: str, option: str) -> Any:
    """Return a library's name of a network as it is, a user's function for its name."""
    from hfedatm.base.plugins import import_object

    known = model.partition(":")[0] in ("torchvision", "timm", "transformers")
    return import_object(option, model) if ":" in model and not known else model


def parse_shape(shape: str) -> tuple[int, ...] | None:
    """Return the sizes in a text such as 3x32x32; None for an empty text."""
    try:
        return tuple(int(part) for part in shape.lower().split("x")) if shape else None
    except ValueError:
        raise UserError(f"--input: got {shape!r}; write it like 3x32x32") from None


def measured_on(option: str, data: str, network: Network) -> Iterable[Batch]:
    """Return the batches that an option names; they can be read several times."""
    from hfedatm.base.plugins import import_object
    from hfedatm_core.checkpoints import FunctionBatches, ImageBatches

    if ":" in data and not Path(data).exists():
        return FunctionBatches(import_object(option, data))
    return ImageBatches(data, network)


@contextmanager
def mistakes() -> Iterator[None]:
    """Turn the core's errors about files and models into `UserError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
