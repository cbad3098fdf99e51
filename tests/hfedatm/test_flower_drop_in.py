"""The strategy, the mod and the stations for Flower apps that are not ours."""

import inspect
import logging
import threading
import time

import numpy as np
import pytest
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from nets import LeNet5
from torch import nn

from hfedatm.flower import HFedATM, Station, grams, stations
from hfedatm.flower.carrying import KEY, Carried, put_grams, take_grams
from hfedatm.flower.watching import TrainingWatch, layer_names
from hfedatm.runtime.in_process import InProcessGrid
from hfedatm_core import (
    AlignmentOptions,
    ChannelGraph,
    PackedGram,
    Update,
    collect_grams,
    merge,
)
from hfedatm_core.grams.triangle import pack

EXAMPLE = torch.zeros(1, 3, 16, 16)


def net(seed: int) -> LeNet5:
    torch.manual_seed(seed)
    return LeNet5()


def asked(node: int = 1, arrays: ArrayRecord | None = None, **config) -> Message:
    content = RecordDict(
        {
            "arrays": arrays or ArrayRecord(net(0).state_dict()),
            "config": ConfigRecord({"server-round": 1, **config}),
        }
    )
    return Message(content, node, MessageType.TRAIN)


def reply(node: int, model: nn.Module, measured=None, examples: int = 10) -> Message:
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": examples, "loss": 1.0 * node}),
        }
    )
    if measured:
        put_grams(content, Carried(measured), "float32")
    message = Message(content, reply_to=asked(node))
    return message


def measured(model: nn.Module, seed: int = 0):
    torch.manual_seed(100 + seed)
    return collect_grams(model, [(torch.randn(80, 3, 16, 16), None)])


def context() -> Context:
    return Context(0, 1, {}, RecordDict(), {})


# --- the strategy


def test_it_takes_what_fedavg_takes():
    given = {
        "fraction_train": 0.5,
        "fraction_evaluate": 0.25,
        "min_train_nodes": 3,
        "min_evaluate_nodes": 4,
        "min_available_nodes": 5,
        "weighted_by_key": "w",
        "arrayrecord_key": "a",
        "configrecord_key": "c",
        "train_metrics_aggr_fn": lambda records, key: MetricRecord(),
        "evaluate_metrics_aggr_fn": lambda records, key: MetricRecord(),
    }
    assert list(given) == list(inspect.signature(FedAvg).parameters)
    named = HFedATM(**given, model=net(0), example=EXAMPLE)
    placed = HFedATM(*given.values(), model=net(0), example=EXAMPLE)
    assert all(getattr(s, key) == value for s in (named, placed) for key, value in given.items())


def test_the_model_is_that_of_the_core_and_the_metrics_are_those_of_fedavg():
    models = [net(1), net(2), net(3)]
    sizes = (10, 20, 30)
    parts = [measured(model, seed) for seed, model in enumerate(models)]
    options = AlignmentOptions(scope="all")
    strategy = HFedATM(model=net(0), example=EXAMPLE, alignment=options)
    replies = [reply(*one) for one in zip((1, 2, 3), models, parts, sizes, strict=True)]
    arrays, metrics = strategy.aggregate_train(1, replies[::-1])
    updates = [
        Update(model.state_dict(), {n: g.shrink(0.75) for n, g in own.items()}, size, name=str(n))
        for n, (model, own, size) in enumerate(zip(models, parts, sizes, strict=True))
    ]
    wanted = merge(updates, ChannelGraph.trace(net(0), EXAMPLE), alignment=options)
    assert wanted.moved > 0
    for name, value in wanted.state.items():
        torch.testing.assert_close(arrays.to_torch_state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert metrics["loss"] == pytest.approx((10 * 1 + 20 * 2 + 30 * 3) / 60)
    assert [layer.how for layer in strategy.report.layers.values()] == ["averaged"] * 2 + [
        "regmean"
    ] * 3


def test_without_grams_and_movement_it_is_fedavg():
    models = [net(1) for _ in range(2)]
    with torch.no_grad():
        models[1].fc3.bias += 0.5
    replies = [reply(n, model) for n, model in enumerate(models, 1)]
    ours, _ = HFedATM(model=net(0), example=EXAMPLE).aggregate_train(1, replies)
    theirs, _ = FedAvg().aggregate_train(1, replies)
    for name, value in theirs.to_torch_state_dict().items():
        torch.testing.assert_close(ours.to_torch_state_dict()[name], value)
        assert ours[name].dtype == theirs[name].dtype


def test_clients_go_on_from_the_average_unless_channels_moved():
    model = net(1)
    near = [net(1), net(1)]
    for part in near:
        with torch.no_grad():
            part.fc2.weight += 0.01 * torch.randn_like(part.fc2.weight)
    near_replies = [reply(n, m, measured(m, n)) for n, m in enumerate(near, 1)]
    grid = InProcessGrid(ClientApp(), [1, 2])

    def sent(strategy, replies):
        arrays, _ = strategy.aggregate_train(1, replies)
        [first, _] = strategy.configure_train(2, arrays, ConfigRecord(), grid)
        return arrays, first.content["arrays"]

    auto = HFedATM(model=model, example=EXAMPLE)
    published, start = sent(auto, near_replies)
    mean = (near[0].fc2.weight + near[1].fc2.weight) / 2
    np.testing.assert_allclose(start["fc2.weight"].numpy(), mean.detach(), rtol=1e-5)
    assert not np.allclose(published["fc2.weight"].numpy(), mean.detach(), rtol=1e-5)
    far = [reply(n, net(n), measured(net(n), n)) for n in (1, 2)]
    published, start = sent(auto, far)
    assert start is published


def test_an_average_without_the_noise_of_a_wrapper_is_never_sent():
    inner = HFedATM(model=net(0), example=EXAMPLE, broadcast="average")
    wrapper = DifferentialPrivacyServerSideFixedClipping(
        inner, noise_multiplier=1.0, clipping_norm=1.0, num_sampled_clients=2
    )
    grid = InProcessGrid(ClientApp(), [1, 2])
    initial = ArrayRecord(net(0).state_dict())
    list(wrapper.configure_train(1, initial, ConfigRecord(), grid))
    replies = [reply(n, net(n), measured(net(n), n)) for n in (1, 2)]
    noised, _ = wrapper.aggregate_train(1, replies)
    [first, _] = wrapper.configure_train(2, noised, ConfigRecord(), grid)
    sent = first.content["arrays"]["fc1.weight"].numpy()
    assert np.array_equal(sent, noised["fc1.weight"].numpy())
    assert not np.allclose(sent, inner._start["fc1.weight"].numpy())


def test_a_reply_with_nan_is_left_out_and_bad_grams_are_not_used(caplog):
    bad = net(2)
    with torch.no_grad():
        bad.fc1.weight[0, 0] = torch.nan
    wrong = {"fc1": measured(net(1))["fc2"]}
    replies = [reply(1, net(1), measured(net(1))), reply(2, bad), reply(3, net(3), wrong)]
    broken = reply(4, net(4))
    broken.content[KEY] = ConfigRecord({"grams": b"no tensors", "clients": 1})
    failed = Message(Error(0, "out of memory"), reply_to=asked(5))
    strategy = HFedATM(model=net(0), example=EXAMPLE)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        arrays, _ = strategy.aggregate_train(1, [*replies, broken, failed])
    assert list(strategy.report.stations) == ["node 1", "node 3", "node 4"]
    assert all(np.isfinite(array.numpy()).all() for array in arrays.values())
    said = caplog.text
    assert "left out: node 2: tensor 'fc1.weight'" in said
    assert "node 3: the Gram of layer 'fc1'" in said
    assert "the Grams of node 4 are left out" in said


@pytest.mark.parametrize("spoil", ["nan", "negative", "indefinite"])
def test_what_is_no_gram_is_not_taken(spoil, caplog):
    gram = measured(net(1))["fc2"]
    dense = gram.dense()
    if spoil == "indefinite":
        dense = dense.diagonal().diag() - 2 * (dense - dense.diagonal().diag())
    bad = PackedGram(pack(dense * (-1.0 if spoil == "negative" else 1.0)), gram.rows)
    if spoil == "nan":
        bad = PackedGram(gram.triangle * torch.nan, gram.rows)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        assert not take_grams(reply(7, net(1), {"fc2": bad})).grams
    assert "the Grams of node 7 are left out: " in caplog.text and "'fc2'" in caplog.text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounding_is_no_offence(dtype):
    content = RecordDict()
    put_grams(content, Carried(measured(net(1))), dtype)
    once = take_grams(Message(content, reply_to=asked()))
    put_grams(content, once, dtype)
    assert take_grams(Message(content, reply_to=asked())).grams.keys() == {"fc1", "fc2", "fc3"}


def test_arrays_of_another_network_are_averaged_by_fedavg(caplog):
    def other(node):
        message = reply(node, nn.Linear(2, 2))
        return message

    with caplog.at_level(logging.WARNING, logger="flwr"):
        strategy = HFedATM(model=net(0), example=EXAMPLE)
        arrays, _ = strategy.aggregate_train(1, [other(1), other(2)])
    assert list(arrays) == ["weight", "bias"]
    assert "averaged by FedAvg" in caplog.text and "names of the model" in caplog.text
    assert strategy.report is None and "averaged by FedAvg" in strategy.not_aligned


def test_a_round_that_is_averaged_shows_no_report_of_the_round_before():
    strategy = HFedATM(model=net(0), example=EXAMPLE)
    strategy.aggregate_train(1, [reply(1, net(1)), reply(2, net(2))])
    assert strategy.report is not None and strategy.not_aligned == ""
    strategy.aggregate_train(2, [reply(node, nn.Linear(2, 2)) for node in (1, 2)])
    assert strategy.report is None and strategy.not_aligned


def test_a_part_of_the_model_is_merged_without_alignment(caplog):
    def part(node):
        message = reply(node, net(node), measured(net(node), node))
        state = {n: v for n, v in net(node).state_dict().items() if n.startswith("fc")}
        message.content["arrays"] = ArrayRecord(state)
        return message

    strategy = HFedATM(model=net(0), example=EXAMPLE)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        arrays, _ = strategy.aggregate_train(1, [part(1), part(2)])
    assert "nothing is aligned" in caplog.text and "conv1.bias" in caplog.text
    assert "conv1.bias" in strategy.not_aligned
    assert {r.how for r in strategy.report.layers.values()} == {"regmean"}
    assert all(name.startswith("fc") for name in arrays)


# --- the mod


class Trained(ClientApp):
    """A ClientApp with one training function and these mods."""

    def __init__(self, function, *mods) -> None:
        super().__init__(mods=list(mods))
        self.train()(function)


def data(rows: int = 96):
    torch.manual_seed(5)
    return torch.randn(rows, 3, 16, 16), torch.randint(10, (rows,))


def training(model=None, batch=32, rows=96, evaluate=False, wrap=lambda model: model):
    """Return a training function, and the networks it has trained."""
    done: list[nn.Module] = []

    def train(message: Message, _: Context) -> Message:
        own = model() if model else net(9)
        own.load_state_dict(message.content["arrays"].to_torch_state_dict())
        own.train()
        called = wrap(own)
        x, y = data(rows)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
        for i in range(0, rows, batch):
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(called(x[i : i + batch]), y[i : i + batch]).backward()
            optimizer.step()
        if evaluate:
            own.eval()(100 * x)
            with torch.no_grad():
                own.train()(100 * x)
        done.append(own)
        content = RecordDict(
            {
                "arrays": ArrayRecord(own.state_dict()),
                "metrics": MetricRecord({"num-examples": rows}),
            }
        )
        return Message(content, reply_to=message)

    return train, done


@pytest.mark.parametrize(
    "wrap",
    [lambda m: m, nn.DataParallel, lambda m: lambda x: m(x=x)],
    ids=["plain", "wrapped", "keywords"],
)
def test_what_is_watched_is_what_one_would_measure_by_hand(wrap):
    function, done = training(evaluate=True, wrap=wrap)
    answer = Trained(function, grams(dtype="float32"))(asked(), context())
    assert len(answer.content.array_records) == 1  # FedAvg's rule
    found = take_grams(answer).grams
    wanted = collect_grams(done[0], [(data()[0], None)])
    assert found.keys() == wanted.keys() == {"fc1", "fc2", "fc3"}
    for name, gram in wanted.items():
        assert found[name].rows == gram.rows == 96
        torch.testing.assert_close(found[name].dense(), gram.dense(), rtol=1e-5, atol=1e-6)


def test_a_data_function_gives_the_same():
    function, _ = training()
    one = take_grams(Trained(function, grams())(asked(), context())).grams
    mod = grams(model=lambda: net(9), data=lambda context: [data()])
    other = take_grams(Trained(function, mod)(asked(), context())).grams
    for name, gram in one.items():
        torch.testing.assert_close(other[name].dense(), gram.dense(), rtol=1e-3, atol=1e-3)


def test_the_oldest_inputs_make_place():
    function, _ = training()
    keep = 2 * data(32)[0].nbytes / 2**20  # two batches of three
    found = take_grams(Trained(function, grams(keep_mb=keep))(asked(), context())).grams
    assert {gram.rows for gram in found.values()} == {64}


def test_grams_of_few_rows_are_not_sent(caplog):
    function, _ = training(rows=48)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        answer = Trained(function, grams())(asked(), context())
    assert KEY not in answer.content and "48 rows are not sent" in caplog.text
    assert KEY in Trained(function, grams(min_rows=48))(asked(), context()).content


def test_training_is_not_disturbed_when_nothing_can_be_measured(caplog):
    def train(message: Message, _: Context) -> Message:
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    def broken(context):
        raise RuntimeError("no such folder")

    with caplog.at_level(logging.WARNING, logger="flwr"):
        assert not Trained(train, grams())(asked(), context()).has_error()
        mod = grams(model=lambda: net(0), data=broken)
        assert not Trained(train, mod)(asked(), context()).has_error()
    assert "no training of the network" in caplog.text and "no such folder" in caplog.text


def test_a_failed_training_stays_what_it_is_and_leaves_no_hooks():
    def train(message: Message, _: Context) -> Message:
        raise ValueError("out of data")

    before = dict(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(ValueError, match="out of data"):
        Trained(train, grams())(asked(), context())
    assert nn.modules.module._global_forward_pre_hooks == before


def test_evaluation_and_unwanted_grams_are_left_alone():
    function, _ = training()
    app = Trained(function, grams())
    app.evaluate()(function)
    message = asked()
    message.metadata.message_type = MessageType.EVALUATE
    assert KEY not in app(message, context()).content
    assert KEY not in app(asked(**{"hfedatm.grams-unwanted": True}), context()).content
    assert KEY in app(asked(), context()).content


def test_model_and_data_belong_together():
    with pytest.raises(ValueError, match="both"):
        grams(model=lambda: net(0))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)


def test_parts_that_look_alike_are_told_apart_by_their_numbers():
    model = Towers()
    arrays = ArrayRecord(model.state_dict())
    assert layer_names(model, arrays) == {"left": "left", "right": "right"}
    assert layer_names(model.right, arrays) == {"": "right"}
    same = Towers()
    same.left.load_state_dict(same.right.state_dict())
    assert layer_names(same.right, ArrayRecord(same.state_dict())) == {}  # nothing on a guess


def test_numbered_arrays_are_named_by_their_order():
    model = net(0)
    arrays = ArrayRecord([value.numpy() for value in model.state_dict().values()])
    assert layer_names(model, arrays)["fc2"] == "fc2"


def test_another_thread_is_not_watched():
    model = net(0).train()
    with TrainingWatch(ArrayRecord(model.state_dict()), 10**8) as watch:
        thread = threading.Thread(target=model, args=(data()[0],))
        thread.start()
        thread.join()
    assert not watch.networks


# --- stations


def test_a_station_averages_models_and_grams():
    models = [net(1), net(2)]
    parts = [measured(model, seed) for seed, model in enumerate(models)]
    station = Station()
    replies = [reply(*one) for one in zip((1, 2), models, parts, (10, 30), strict=True)]
    arrays, _ = station.aggregate_train(1, replies)
    theirs, _ = FedAvg().aggregate_train(
        1, [reply(n, m, None, size) for n, m, size in zip((1, 2), models, (10, 30), strict=True)]
    )
    assert np.array_equal(arrays["fc1.weight"].numpy(), theirs["fc1.weight"].numpy())
    assert station.carried.clients == 2 and station.examples == 40
    mean = (parts[0]["fc1"].dense() + parts[1]["fc1"].dense()) / 2
    torch.testing.assert_close(station.carried.grams["fc1"].dense(), mean, rtol=1e-5, atol=1e-6)


def test_a_station_whose_clients_fail_is_a_failure_of_that_station_alone():
    function, _ = training(rows=64)

    def sometimes(message: Message, own: Context) -> Message:
        if message.metadata.dst_node_id in (3, 4):
            raise RuntimeError("no disk")
        return function(message, own)

    grid = stations(InProcessGrid(Trained(sometimes, grams()), range(1, 5)), 2)
    assert grid.get_node_ids() == [1, 2]
    strategy = HFedATM(model=net(0), example=EXAMPLE)
    messages = strategy.configure_train(1, ArrayRecord(net(0).state_dict()), ConfigRecord(), grid)
    replies = list(grid.send_and_receive(messages))
    assert sorted(message.has_error() for message in replies) == [False, True]
    strategy.aggregate_train(1, replies)
    assert list(strategy.report.stations) == ["node 1"]


def test_stations_may_be_chosen_node_by_node():
    grid = InProcessGrid(ClientApp(), range(1, 6))
    chosen = stations(grid, [[1, 5], [2, 3, 4]])
    assert [g.get_node_ids() for g in chosen.grids.values()] == [[1, 5], [2, 3, 4]]
    with pytest.raises(ValueError, match="at least one station"):
        stations(grid, 0)


def test_stations_wait_for_clients_that_join_later(monkeypatch):
    joined = [[], [4], [1, 4], [1, 2, 4], [1, 2, 4]]
    grid = InProcessGrid(ClientApp(), [])
    monkeypatch.setattr(grid, "get_node_ids", lambda: joined.pop(0))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    found = stations(grid, 2)
    assert sorted(n for g in found.grids.values() for n in g.get_node_ids()) == [1, 2, 4]
    assert not joined
