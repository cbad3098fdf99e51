"""Data, training and federations that several benchmarks use; all are synthetic and seeded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from hfedatm.base.building import build_method, build_model, build_rule, example_grams, load_data
from hfedatm.base.records import state_to_record
from hfedatm.base.resolving import resolve
from hfedatm.flower_internals import identify_process
from hfedatm.runtime.in_process import InProcessGrid
from hfedatm.runtime.local import local_stations
from hfedatm_core import ChannelGraph
from hfedatm_core.data import DataSpec, Domain, DomainData
from hfedatm_core.models import lenet5
from server_app.strategy import HFedATMStrategy

logging.getLogger("flwr").setLevel(logging.WARNING)

DIGITS = DataSpec("image", 10, (1, 28, 28))


def random_images(
    data_dir: str | None = None, examples: int = 256, channels: int = 1, size: int = 28
) -> DomainData:
    """Return two source domains and a tiny target domain of noise."""
    generator = torch.Generator().manual_seed(0)
    spec = DataSpec("image", 10, (channels, size, size))

    def domain(name: str, count: int) -> Domain:
        images = torch.randint(
            256, (count, *spec.input_shape), generator=generator, dtype=torch.uint8
        )
        return Domain(name, images, torch.randint(10, (count,), generator=generator))

    return DomainData(
        spec,
        {"a": domain("a", examples), "b": domain("b", examples), "target": domain("target", 2)},
    )


def no_training(model: Any, batches: Any, received: Any, settings: Any) -> dict[str, float]:
    """Train nothing, as the quickest possible client."""
    return {"loss": 0.0}


def be_a_process_of_a_run() -> None:
    """Identify this process to Flower, as its runtimes do before a process may make a message."""
    identify_process()


def three_tiers(given: dict[str, Any]) -> Callable[[], object]:
    """Return a job that runs all global rounds of these settings in this process.

    This is the part of ``hfedatm run`` between its checks and its output files.
    """
    be_a_process_of_a_run()
    settings = resolve({"target-domain": "target", "device": "cpu", "diagnostics": False, **given})
    data, method, rule = load_data(settings), build_method(settings), build_rule(settings)
    model = build_model(settings, data.spec, method)
    grams = example_grams(settings, model, data.spec) if rule.needs_grams else {}
    graph = ChannelGraph.trace(model, (data.spec.example(),))
    layers = {name: gram.dim for name, gram in grams.items()}
    stations = local_stations(settings)
    start = state_to_record(model.state_dict())

    def run() -> HFedATMStrategy:
        strategy = HFedATMStrategy(settings, rule, method, graph, layers, {})
        strategy.start(stations, start, num_rounds=settings.rounds)
        record = strategy.record
        if record.failures or record.clients.answered != settings.num_clients:
            raise RuntimeError(f"this round is not worth timing: {record}")
        return strategy

    return run


flat_app = ClientApp()


@flat_app.train()
def _flat_train(message: Message, context: Context) -> Message:
    """Do the steps of Flower's quickstart client, except the training."""
    model = lenet5.build(DIGITS)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"loss": 0.0, "num-examples": 8}),
        }
    )
    return Message(content, reply_to=message)


def flat_fedavg(clients: int, rounds: int) -> Callable[[], object]:
    """Return a job that runs Flower's FedAvg over the same engine, without stations."""
    be_a_process_of_a_run()
    grid = InProcessGrid(flat_app, range(clients))
    start = ArrayRecord(lenet5.build(DIGITS).state_dict())
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients, min_train_nodes=clients)
    return lambda: strategy.start(grid, start, num_rounds=rounds)
