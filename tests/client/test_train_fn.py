"""A training function of the user's: what it is given, what it may keep, what it must return."""

import pytest
import torch
from helpers import ask_client, log_lines, run_small, small_settings

from client_app.train_fn import load_train_fn
from hfedatm.base.building import build_method, build_model, load_data
from hfedatm.base.plugins import PluginError
from hfedatm.base.records import record_to_state
from hfedatm.base.schedule import learning_rate
from hfedatm.contracts import TrainingContext, forward

HERE = "test_train_fn"
SEEN: list[TrainingContext] = []


def step(model, batches, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for inputs, targets in batches:
        loss = torch.nn.functional.cross_entropy(forward(model, inputs), targets)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    return {"loss": loss.item()}


def four(model, batches, received, settings):
    return step(model, batches, settings.lr)


def five(model, batches, received, settings, context):
    SEEN.append(context)
    context.memory["calls"] = context.memory.get("calls", torch.tensor(0)) + 1
    return step(model, batches, context.lr)


def keyword(model, batches, received, settings, *, context, extra=None):
    assert context.lr > 0 and extra is None
    return step(model, batches, context.lr)


def careless(model, batches, received, settings, context):
    context.memory["best"] = 0.5
    return {"loss": 0.1}


def too_many(model, batches, received, settings, context, more):
    """Cannot be called."""


@pytest.fixture(autouse=True)
def _unseen():
    SEEN.clear()


def initial(settings):
    return build_model(settings, load_data(settings).spec, build_method(settings)).state_dict()


def test_context_tells_round_rate_validation_and_device():
    settings = small_settings(train_fn=f"{HERE}:five", rounds=3, lr=0.4)
    ask_client(settings, 1, initial(settings), round=2, station_round=2)
    [context] = SEEN
    assert (context.round, context.station_round) == (2, 2)
    assert context.lr == learning_rate(settings, 2, 2) < settings.lr
    assert context.device == torch.device("cpu")
    assert sum(len(targets) for _, targets in context.validation) == 10  # a tenth of 100


def test_without_a_validation_fraction_there_is_no_validation_batch():
    settings = small_settings(train_fn=f"{HERE}:five", validation_fraction=0)
    ask_client(settings, 1, initial(settings))
    assert list(SEEN[0].validation) == []


def test_memory_is_kept_from_round_to_round_by_each_client():
    settings = small_settings(train_fn=f"{HERE}:five")
    for number in (1, 2):
        ask_client(settings, 1, initial(settings), round=number)
    ask_client(settings, 2, initial(settings), round=2)
    ask_client(settings, 1, initial(settings), round=2)  # the server asks again for a round
    assert [int(context.memory["calls"]) for context in SEEN] == [1, 2, 1, 2]


def test_the_cosine_schedule_reaches_a_function_that_takes_context(tmp_path):
    run_small(tmp_path, train_fn=f"{HERE}:five", schedule="cosine", lr=0.1)
    settings = small_settings(lr=0.1)
    moments = {(c.round, c.station_round): c.lr for c in SEEN}
    assert moments == {(r, s): learning_rate(settings, r, s) for r in (1, 2) for s in (1, 2)}


def test_the_function_with_four_parameters_works_as_before():
    """It trains at ``lr``; with a constant schedule both give the same model."""
    settings = {
        name: small_settings(train_fn=f"{HERE}:{name}", schedule="constant")
        for name in ("four", "five", "keyword")
    }
    models = [
        record_to_state(ask_client(s, 1, initial(s)).array_records["model"])
        for s in settings.values()
    ]
    for other in models[1:]:
        assert all(torch.equal(models[0][name], other[name]) for name in models[0])


@pytest.mark.parametrize(
    "name, schedule, warned",
    [("four", "cosine", True), ("four", "constant", False), ("five", "cosine", False)],
)
def test_who_drops_the_schedule_is_told(tmp_path, name, schedule, warned):
    with log_lines() as lines:
        run_small(tmp_path, train_fn=f"{HERE}:{name}", schedule=schedule, rounds=1)
    assert any("has no parameter 'context'" in line for line in lines) == warned


def test_the_run_says_what_trained(tmp_path):
    with log_lines() as lines:
        run_small(tmp_path, train_fn=f"{HERE}:five", rounds=1)
    header = next(line for line in lines if line.startswith("HFedATM:"))
    assert f"trained by {HERE}:five" in header and "fedavg" not in header


def test_memory_holds_tensors_only():
    settings = small_settings(train_fn=f"{HERE}:careless")
    reason = ask_client(settings, 1, initial(settings)).config_records["failure"]["reason"]
    assert "context.memory holds tensors by name; 'best' is float: torch.tensor(value)" in reason


def test_a_function_that_cannot_be_called_is_refused():
    with pytest.raises(PluginError, match="cannot be called as needed .*'more'"):
        load_train_fn(small_settings(train_fn=f"{HERE}:too_many"))
