"""A mod that measures Grams around a ClientApp's own training function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, MessageType, RecordDict
from torch import nn

from hfedatm.flower.carrying import Carried, grams_wanted, put_grams
from hfedatm.flower.naming import named_as
from hfedatm.flower.watching import TrainingWatch
from hfedatm_core import Gram, collect_grams
from hfedatm_core.checkpoints import as_batches
from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.grams.encoding import WireType

_LOG = logging.getLogger("flwr")
Call = Callable[[Message, Context], Message]


def grams(
    *,
    model: Callable[[], nn.Module] | None = None,
    data: Callable[[Context], Iterable[Any]] | None = None,
    conv: bool = False,
    bias: bool = False,
    max_dim: int = 4096,
    rank: int = 256,
    min_rows: int = 64,
    keep_mb: float = 64.0,
    dtype: WireType = "float16",
) -> Callable[[Message, Context, Call], Message]:
    """Return a mod for ``ClientApp(mods=[grams()])`` that adds Grams to training replies.

    The training function stays unchanged. Without arguments the mod watches which network the
    function trains, keeps the last inputs of that network, and passes them through the trained
    network once more, in evaluation mode. The mod can stand anywhere among other mods. If there is
    nothing to measure, or measuring fails, the reply goes out without Grams and a line of the log
    says why: training is never disturbed.

    Parameters
    ----------
    model, data
        For training that torch does not see (scikit-learn, another process), or to measure on
        chosen data: a function that builds the network, into which the reply's arrays are loaded,
        and one that takes the Context and yields inputs, alone or with targets.
    conv, bias
        Also measure convolutions; append the constant input of the bias.
    max_dim, rank
        Layers wider than ``max_dim`` send a factor of ``rank`` rows.
    min_rows
        A Gram of fewer rows is not sent: examples can be recovered from it.
    keep_mb
        Megabytes of inputs to keep while the training function runs.
    dtype
        Type of the numbers sent.
    """
    if (model is None) != (data is None):
        raise ValueError("grams: give both model= and data=, or neither")
    options: dict[str, Any] = {"conv": conv, "bias": bias, "max_dim": max_dim, "rank": rank}

    def measure(reply: Message, context: Context, watch: TrainingWatch) -> dict[str, Gram]:
        if model is not None and data is not None:
            network = model()
            _load(network, reply.content)
            return collect_grams(network, as_batches(data(context)), **options)
        if not watch.networks:
            raise ValueError(
                "no training of the network whose arrays the server sent was seen; give "
                "grams(model=..., data=...) if torch does not train it in this process"
            )
        found: dict[str, Gram] = {}
        for trained in watch.networks:
            measured = collect_grams(trained.network, trained.batches(), **options)
            names = trained.names
            found = {names[n]: gram for n, gram in measured.items() if n in names} | found
        return found

    def mod(message: Message, context: Context, call_next: Call) -> Message:
        training = message.metadata.message_type.partition(".")[0] == MessageType.TRAIN
        if not training or not grams_wanted(message.content):
            return call_next(message, context)
        arrays = {n: a for r in message.content.array_records.values() for n, a in r.items()}
        with TrainingWatch(arrays, int(keep_mb * 2**20)) as watch:
            reply = call_next(message, context)
        if reply.has_error():
            return reply
        try:
            found = measure(reply, context, watch)
            enough = {n: g for n, g in found.items() if g.rows >= min_rows}
            if len(enough) < len(found):
                few = min(gram.rows for gram in distinct(found).values())
                _LOG.warning("hfedatm: Grams of %d rows are not sent (min_rows)", few)
            if enough:
                put_grams(reply.content, Carried(enough), dtype)
        except Exception as error:  # of any class: the training itself has succeeded
            _LOG.warning("hfedatm: no Grams are sent: %s", error)
        return reply

    return mod


def _load(network: nn.Module, content: RecordDict) -> None:
    """Give a network the arrays of a reply."""
    [record] = content.array_records.values()
    own: dict[str, Any] = network.state_dict()
    network.load_state_dict(named_as(record, own), strict=False)
