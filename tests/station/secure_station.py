"""One station round with secure aggregation, whose clients and messages can be tampered with."""

from flwr.app import ConfigRecord, Error, Message
from helpers import small_settings, tiny_data

from client_app.app import app as client_app
from hfedatm.base.building import build_method, build_model, example_grams
from hfedatm.base.records import Task, record_to_state, state_to_record
from hfedatm.runtime.in_process import InProcessGrid
from station_app.secure import gather_securely
from station_app.strategy import StationStrategy

CLIENTS = 5
SECURE = {
    "secure-aggregation": True,
    "stations": 1,
    "clients-per-station": CLIENTS,
    "gram-min-rows": 1,
}
# A sum cannot be bounded client by client: what is compared with it is not bounded either.
UNBOUNDED = {"bound-factor": 0, "claim-factor": 0, "least-agreement": 0}
PLAIN = SECURE | UNBOUNDED | {"secure-aggregation": False}


class Spied:
    """The ClientApp, with every reply noted and some spoilt: ``{(type, client): spoil}``.

    ``meddle`` may change what the station sends before a client sees it.
    """

    def __init__(self, spoil=None, meddle=None):
        self.spoil, self.meddle = spoil or {}, meddle
        self.seen: list[tuple[str, int, Message]] = []
        self.asked: list[tuple[str, int, Message]] = []

    def __call__(self, message, context):
        kind, client = message.metadata.message_type, message.metadata.dst_node_id
        if self.meddle:
            self.meddle(kind, client, message)
        self.asked.append((kind, client, message))
        reply = self.answer(message, context, client)
        if spoil := self.spoil.get((kind, client)):
            reply = spoil(message, reply)
        self.seen.append((kind, client, reply))
        return reply

    def answer(self, message, context, client):
        return client_app(message, context)


def silent(message, reply):
    return Message(Error(0, "gone"), reply_to=message)


def model_and_layers(settings):
    model = build_model(settings, tiny_data().spec, build_method(settings))
    layers = example_grams(settings, model, tiny_data().spec)
    return model.state_dict(), {name: gram.dim for name, gram in layers.items()}


def gather(app=None, run="run", clients=range(CLIENTS), **given):
    """One station round with Grams; return the strategy, its mean model and its metrics."""
    settings = small_settings(**(SECURE | {"station-rounds": 1, "alpha": 1.0} | given))
    state, layers = model_and_layers(settings)
    strategy = StationStrategy(Task("train", settings, 1, station=0, run=run), layers)
    grid = InProcessGrid(app or client_app, clients)
    messages = strategy.configure_train(1, state_to_record(state), ConfigRecord(), grid)
    if settings.secure_aggregation:
        replies = gather_securely(grid, messages, strategy.expected_update(1))
    else:
        replies = grid.send_and_receive(messages)
    arrays, metrics = strategy.aggregate_train(1, replies)
    return strategy, record_to_state(arrays), metrics
