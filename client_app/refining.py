"""Compare the merged model with the model of this client's station, layer by layer."""

from __future__ import annotations

from itertools import islice

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from client_app.client import LocalWork
from client_app.rows import require_rows
from hfedatm.base.building import build_model, trace_channels
from hfedatm.base.errors import UserError
from hfedatm.base.exchange import OWN, AskedLayers, answers_to_records
from hfedatm.base.privacy_settings import gram_examples, why_not_exact
from hfedatm.base.records import find_record, record_to_state
from hfedatm_core import collect_answers


def answer(work: LocalWork) -> RecordDict:
    """Return what some layers of the merged model miss on this client's training examples."""
    s, kept = work.settings, work.kept
    if why := why_not_exact(s):
        raise UserError(f"refining: refused, because {why}")
    asked = AskedLayers.of(work.content, work.received)
    brought = find_record(work.content, OWN, ArrayRecord)
    own = kept.own() if brought is None else record_to_state(brought)
    network = build_model(s, work.data.spec, work.method)
    graph = trace_channels(s, None, network, work.data.spec)  # on the CPU
    network.load_state_dict(own)
    with work.reproducible():
        answers = collect_answers(
            work.model,
            network.to(work.device),
            graph,
            islice(work.batches(), s.gram_batches or None),
            asked.widths,
            max_dim=s.gram_max_dim,
            rank=s.gram_rank,
        )
    require_rows(answers.grams, s)
    kept.keep(work.received)
    if brought is not None:
        kept.keep_own(own)
    records = answers_to_records(answers, s.gram_dtype)
    metrics = MetricRecord({"num-examples": gram_examples(s, work.num_examples)})
    return RecordDict({**records, "metrics": metrics})
