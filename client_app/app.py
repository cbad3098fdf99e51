"""The ClientApp: one handler per kind of task, each a few lines.

A handler that fails answers with its error: the station records it, the server logs it, and the
person who started the run reads it. Modules that need torch are imported late, because a node does
not need torch to say where it is in the tree.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from client_app.own_process import in_own_process
from hfedatm.base.answering import answering
from hfedatm.base.handover.parcel import by_parcel
from hfedatm.base.noting import noted
from hfedatm.base.trust.introduction import introduction
from hfedatm.base.trust.obeying import obey
from hfedatm.base.trust.origin import known_origin

if TYPE_CHECKING:
    from client_app.client import LocalWork

app = ClientApp(mods=[in_own_process, known_origin, by_parcel, noted, obey])


@app.query()
@answering
def identify(message: Message, context: Context) -> RecordDict:
    """Say where in the tree this node is: which share of the data it has, of how many."""
    return introduction(message, context, "client")


@app.train()
@answering
def train(message: Message, context: Context) -> RecordDict:
    """Train the received model; measure its Grams too if the station asks for them."""
    from hfedatm.base.records import grams_to_record, state_to_record

    work = _work(message, context)
    started = time.perf_counter()
    metrics = work.train()
    reply = RecordDict({"model": state_to_record(work.model.state_dict())})
    if work.task.send_grams:
        trained = time.perf_counter()
        reply["grams"] = grams_to_record(work.grams(), work.gram_dtype)
        reply.update(work.profiles())
        metrics["gram-seconds"] = time.perf_counter() - trained
    metrics |= work.spend()
    metrics |= {"num-examples": work.num_examples, "seconds": time.perf_counter() - started}
    reply["metrics"] = MetricRecord({**metrics})
    return work.deliver(reply)


@app.train("measure")
@answering
def measure(message: Message, context: Context) -> RecordDict:
    """Measure the Grams of the received model."""
    from hfedatm.base.records import grams_to_record

    work = _work(message, context)
    started = time.perf_counter()
    arrays = {"grams": grams_to_record(work.grams(), work.gram_dtype), **work.profiles()}
    metrics = {
        "num-examples": work.num_examples,
        "gram-seconds": time.perf_counter() - started,
        **work.spend(),
    }
    return work.deliver(RecordDict({**arrays, "metrics": MetricRecord({**metrics})}))


@app.train("refine")
@answering
def refine(message: Message, context: Context) -> RecordDict:
    """Say what some layers of the merged model miss."""
    from client_app.refining import answer

    return answer(_work(message, context))


@app.train("look")
@answering
def look(message: Message, context: Context) -> RecordDict:
    """Measure BatchNorm statistics of the merged model."""
    from hfedatm.base.records import state_to_record

    moments, examples = _work(message, context).norm_moments()
    metrics = MetricRecord({"num-examples": examples})
    return RecordDict({"statistics": state_to_record(moments), "metrics": metrics})


@app.train("count")
@answering
def count(message: Message, context: Context) -> RecordDict:
    """Send this client's numbers of examples by class."""
    from client_app import counting

    return counting.count(message.content, context)


@app.train("prepare")
@answering
def prepare(message: Message, context: Context) -> RecordDict:
    """Send the arrays that the method averages before the round."""
    from hfedatm.base.records import state_to_record

    work = _work(message, context)
    reply = RecordDict({"shared": state_to_record(work.share())})
    reply["metrics"] = MetricRecord({"num-examples": work.num_examples})
    return work.deliver(reply)


@app.evaluate()
@answering
def evaluate(message: Message, context: Context) -> RecordDict:
    """Evaluate the received model on this client's validation examples."""
    from hfedatm.base.records import state_to_record

    numbers, sums = _work(message, context).evaluate()
    reply = RecordDict({"metrics": MetricRecord({**numbers})})
    if sums:
        reply["sums"] = state_to_record(sums)
    return reply


@app.train("share")
@answering
def share(message: Message, context: Context) -> RecordDict:
    """Secure aggregation: send shares of this client's secrets to its peers."""
    from client_app import secure

    return secure.share(message.content, context)


@app.train("check")
@answering
def check(message: Message, context: Context) -> RecordDict:
    """Secure aggregation: name the peers whose shares are false."""
    from client_app import secure

    return secure.check(message.content, context)


@app.train("mask")
@answering
def mask(message: Message, context: Context) -> RecordDict:
    """Secure aggregation: send the withheld reply, masked."""
    from client_app import secure

    return secure.mask(message.content, context)


@app.train("sign")
@answering
def sign(message: Message, context: Context) -> RecordDict:
    """Secure aggregation: sign the list of clients whose replies are in the sum."""
    from client_app import secure

    return secure.sign(message.content, context)


@app.train("reveal")
@answering
def reveal(message: Message, context: Context) -> RecordDict:
    """Secure aggregation: send the shares that remove the masks from the sum."""
    from client_app import secure

    return secure.reveal(message.content, context)


def _work(message: Message, context: Context) -> LocalWork:
    from client_app.client import LocalWork

    return LocalWork(message.content, context)
