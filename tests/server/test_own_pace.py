"""Stations at their own pace: who is merged when, what a late update counts, and resuming."""

import time

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from helpers import SMALL, assert_same_model, failures_of, lines_of, run_small
from hypothesis import given
from hypothesis import strategies as st

import hfedatm.runtime.local as local
from hfedatm.base.errors import UserError
from hfedatm.runtime.stations import LocalStationsGrid
from hfedatm_core import Update, merge
from hfedatm_core.staleness import discount, rebased
from server_app.flights import Flights
from server_app.pacing import PacedGrid
from server_app.strategy import HFedATMStrategy

FAST = {
    "stations": 3,
    "clients_per_station": 1,
    "station_rounds": 1,
    "schedule": "constant",
}


def paced(buffer: int, seconds: str, **more) -> str:
    given = {"buffer": buffer, "station_seconds": seconds, **more}
    return ",".join(f"{key}={value}" for key, value in given.items())


def merged(folder):
    """Return of every round the clock, and the stations that it merged with their lateness."""
    return [
        (line["metrics"]["clock"], {s["name"][-1]: s["late"] for s in line["per_station"]})
        for line in lines_of(folder)
    ]


def test_waiting_for_all_is_what_a_run_does_without_a_buffer(tmp_path):
    plain = run_small(tmp_path, "plain", **FAST)
    waiting = run_small(tmp_path, "waiting", rule_params=paced(3, "1:2:3"), **FAST)
    assert_same_model(plain, waiting)
    assert merged(waiting) == [(3.0, dict.fromkeys("012", 0)), (6.0, dict.fromkeys("012", 0))]


def test_a_slow_station_is_merged_when_it_is_done(tmp_path):
    run = run_small(tmp_path, rounds=4, rule_params=paced(2, "1:1:2.5"), **FAST)
    assert merged(run) == [
        (1.0, {"0": 0, "1": 0}),
        (2.0, {"0": 0, "1": 0}),
        (3.0, {"2": 2, "0": 0}),
        (4.0, {"1": 1, "0": 0}),
    ]
    assert [line["stations"] for line in lines_of(run)] == [{"asked": 2, "answered": 2}] * 4


@pytest.mark.parametrize(
    ("stop", "method"),
    [(1, "fedavg"), (2, "fedavg"), (3, "fedavg"), (2, "fedsr"), (2, "fediir")],
)
def test_a_resumed_run_asks_the_stations_again_that_were_at_work(tmp_path, stop, method):
    given = FAST | {"client_method": method, "rule_params": paced(2, "1:1:2.5")}
    whole = run_small(tmp_path, "whole", rounds=4, **given)
    stopped = run_small(tmp_path, "stopped", rounds=stop, **given)
    local.run_locally({"resume": str(stopped), "rounds": 4})
    assert merged(stopped) == merged(whole)
    assert_same_model(stopped, whole)


def test_an_update_beyond_the_bound_is_dropped_with_a_line_also_after_a_restart(tmp_path):
    given = FAST | {"rule_params": paced(2, "1:1:2.5", max_staleness=1)}
    whole = run_small(tmp_path, "whole", rounds=4, **given)
    assert [(f["node"], f["reason"]) for f in failures_of(whole)] == [
        ("station 2", "dropped: 2 rounds late, max_staleness is 1")
    ]
    stopped = run_small(tmp_path, "stopped", rounds=2, **given)
    local.run_locally({"resume": str(stopped), "rounds": 4})
    assert_same_model(stopped, whole)
    assert failures_of(stopped) == failures_of(whole)


@pytest.mark.parametrize(
    ("params", "more", "why"),
    [
        (paced(4, ""), {}, "buffer = 4 is more than stations = 3"),
        (paced(2, "1:2"), {}, "names 2 stations, the run has 3"),
        (paced(2, "1:x:1"), {}, "positive number"),
        (paced(2, "1:0:1"), {}, "positive number"),
        ("station_seconds=1:1:1", {}, "no meaning without buffer"),
        (paced(2, ""), {"station-start": "own"}, "share a start"),
        (paced(2, ""), {"tiers": "3x1x2"}, "not for tiers=3x1x2"),
        ("buffer=2", {"server-rule": "mtgc"}, "buffer"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, params, more, why):
    given = SMALL | {"stations": 3, "rule-params": params, "output": str(tmp_path)} | more
    with pytest.raises(UserError, match=why):
        local.run_locally(given)


# --- what a late update counts


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.floats(0, 2))
def test_the_mean_of_late_updates_is_the_step_of_fedbuff(lates, power):
    torch.manual_seed(len(lates))
    now = {"w": torch.randn(3, dtype=torch.float64)}
    starts = [{"w": torch.randn(3, dtype=torch.float64)} for _ in lates]
    steps = [torch.randn(3, dtype=torch.float64) for _ in lates]
    updates = [
        Update(rebased({"w": s["w"] + d}, s, now, discount(t, power)), num_examples=i + 1)
        for i, (t, s, d) in enumerate(zip(lates, starts, steps, strict=True))
    ]
    found = merge(updates, fot=False, regmean=False).state["w"]
    weights = torch.arange(1.0, len(lates) + 1, dtype=torch.float64)
    factors = torch.tensor([(1.0 + t) ** -power for t in lates], dtype=torch.float64)
    step = ((weights * factors)[:, None] * torch.stack(steps)).sum(0) / weights.sum()
    assert torch.allclose(found, now["w"] + step)


@given(st.integers(0, 50), st.floats(0, 3), st.integers(0, 100))
def test_a_late_update_keeps_variances_positive_and_counts_whole(late, power, seed):
    torch.manual_seed(seed)
    states = [
        {"n.running_var": torch.rand(4), "n.num_batches_tracked": torch.tensor(i)} for i in range(3)
    ]
    found = rebased(*states, discount(late, power))
    assert (found["n.running_var"] >= 0).all() and found["n.num_batches_tracked"] == 0
    assert 0 < discount(late, power) <= 1 == discount(0, power)


# --- in real time


def test_in_real_time_the_first_stations_are_merged_and_the_slow_one_goes_on():
    def work(grid, content: RecordDict) -> RecordDict:
        time.sleep(0.6 if grid == "slow" else 0.01)
        return RecordDict()

    inner = LocalStationsGrid(work, {0: "fast", 1: "slow", 2: "fast"})  # type: ignore[dict-item]
    flights = Flights(most_late=5)
    grid = PacedGrid(inner, flights, buffer=2)

    def ask(number: int, kind: str = "train") -> list[int]:
        flights.begin_round(number)
        flights.waiting = kind == "train"
        asked = [Message(RecordDict(), s, kind) for s in grid.get_node_ids()]
        return sorted(r.metadata.src_node_id for r in grid.send_and_receive(asked, timeout=5))

    assert ask(1) == [0, 2]
    assert grid.get_node_ids() == [0, 2]  # the others are not disturbed
    assert ask(1, "evaluate") == [0, 2]
    assert ask(2) == [0, 2]
    time.sleep(0.7)
    assert 1 in ask(3) and flights.late(1) == 2


def test_in_real_time_a_silent_station_costs_itself_only():
    class Silent(LocalStationsGrid):
        def pull_messages(self, message_ids):
            return [m for m in super().pull_messages(message_ids) if m.metadata.src_node_id]

    inner = Silent(lambda grid, content: RecordDict(), {0: "a", 1: "b"})  # type: ignore[dict-item]
    flights = Flights(most_late=5)
    grid = PacedGrid(inner, flights, buffer=2)
    flights.begin_round(1)
    flights.waiting = True
    asked = [Message(RecordDict(), s, "train") for s in (0, 1)]
    replies = {r.metadata.src_node_id: r for r in grid.send_and_receive(asked, timeout=0.3)}
    assert replies[0].has_error() and "no reply within 0.3 s" in replies[0].error.reason
    assert not replies[1].has_error() and not flights.at_work


def test_a_reply_without_an_update_does_not_end_the_wait():
    def work(grid, content: RecordDict) -> RecordDict:
        if grid == "raises":
            raise RuntimeError("broken")
        return RecordDict({"failure": ConfigRecord()} if grid == "fails" else {})

    names = {0: "fails", 1: "raises", 2: "answers", 3: "too slow"}
    inner = LocalStationsGrid(work, names)  # type: ignore[arg-type]
    flights = Flights(most_late=5)
    grid = PacedGrid(inner, flights, buffer=1, durations=(1.0, 2.0, 3.0, 4.0))
    flights.begin_round(1)
    flights.waiting = True
    asked = [Message(RecordDict(), station, "train") for station in names]
    heard = [r.metadata.src_node_id for r in grid.send_and_receive(asked, timeout=5)]
    assert heard == [0, 1, 2] and list(flights.at_work) == [3] and flights.clock == 3.0


def test_the_server_keeps_no_more_models_than_updates_may_be_late():
    flights = Flights(most_late=2)
    flights.depart(0)
    for number in range(1, 10):
        flights.begin_round(number)
        flights.depart(number)
        flights.starts[number] = {}
        assert len(flights.starts) <= 3


def test_a_server_killed_in_the_middle_of_a_round_loses_nothing(tmp_path, monkeypatch):
    given = FAST | {"client_method": "fedsr", "rule_params": paced(2, "1:1:2.5"), "rounds": 4}
    whole = run_small(tmp_path, "whole", **given)
    aggregate = HFedATMStrategy.aggregate_train

    def killed(self, server_round, replies):
        found = aggregate(self, server_round, replies)
        if self.record.round == 3:  # the late update has just been merged, nothing is saved yet
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HFedATMStrategy, "aggregate_train", killed)
        run_small(tmp_path, "killed", **given)
    local.run_locally({"resume": str(tmp_path / "killed")})
    assert merged(tmp_path / "killed") == merged(whole)
    assert_same_model(tmp_path / "killed", whole)
