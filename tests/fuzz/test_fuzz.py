"""Whatever others send: no crash, no hang, nobody else harmed. ``make fuzz`` tries far more."""

import tracemalloc
from random import Random

import fuzz
import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from fuzz_mutations import spoil
from helpers import small_settings

from hfedatm.base.records import state_to_record
from hfedatm.base.wire import Expected, read_update

MUTATIONS = 3000


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HFEDATM_STATE", str(tmp_path_factory.mktemp("state")))
        yield fuzz.all_targets(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow
def test_nothing_that_is_sent_breaks_anything(targets):
    counts = fuzz.divide(MUTATIONS, targets)
    assert sum(counts.values()) == MUTATIONS and min(counts.values()) > 0
    broken, dropped, accepted = [], 0, 0
    for name, count in counts.items():
        outcomes, found = fuzz.attack(targets[name], count, seed=1)
        broken += found
        dropped += outcomes["dropped"]
        accepted += outcomes["accepted"]
    assert not broken, "\n".join(broken[:3])
    assert dropped > MUTATIONS / 2, "the mutations are too gentle to show anything"
    assert accepted > MUTATIONS / 50, "the mutations are too rough to get past the first check"


def test_what_once_broke_something_no_longer_does(targets):
    for name, target, given in fuzz.kept_cases(targets):
        try:
            target.check(given)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def test_a_spoilt_reply_takes_less_memory_than_twice_an_honest_one():
    state = {f"layer{n}": torch.zeros(200, 500) for n in range(10)}
    expected = Expected(small_settings(), "client", arrays=state)
    honest = RecordDict(
        {"model": state_to_record(state), "metrics": MetricRecord({"num-examples": 5})}
    )
    for seed in range(60):
        given = spoil(honest, Random(seed))
        reply = Message(given, reply_to=Message(RecordDict(), 1, "train"))
        tracemalloc.start()
        try:
            read_update(reply, expected)
        except Exception:  # noqa: S110, BLE001
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * expected.most_bytes, f"seed {seed}"
