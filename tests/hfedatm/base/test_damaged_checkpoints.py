"""A damaged file of a run: the last good one is used, and nothing is overwritten."""

import shutil

import pytest
import torch
from helpers import assert_same_model, lines_of, run_small

from hfedatm.base.errors import UserError
from hfedatm.base.results import RunFolder
from hfedatm.base.tensor_files import read_tensors, save_tensors
from hfedatm.runtime.local import run_locally

ROUNDS = 3
RUN = {"client_method": "fediir", "client_params": "gamma=1"}  # clients and server remember


def flip(content):
    middle = len(content) - 100  # in the tensors, which no parser looks at
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGE = {
    "one bit": flip,
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "another file": lambda content: b"<html>" * 100,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_small(tmp_path_factory.mktemp("whole"), rounds=ROUNDS, **RUN)


@pytest.fixture(scope="module")
def stopped_before_the_last(tmp_path_factory):
    """Return a run of two rounds that has a third to do."""

    class Killed(BaseException):
        pass

    def stop(self, record, model, server):
        if record.round == ROUNDS:
            raise Killed
        save(self, record, model, server)

    save = RunFolder.save_round
    place = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunFolder, "save_round", stop)
        run_small(place, rounds=ROUNDS, **RUN)
    return place / "run"


@pytest.fixture
def stopped(stopped_before_the_last, tmp_path):
    return shutil.copytree(stopped_before_the_last, tmp_path / "run")


def scores(folder):
    return [(line["round"], line["unseen"], line["source"]) for line in lines_of(folder)]


@pytest.mark.parametrize("file", ["last", f"server-{ROUNDS - 1}"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_the_round_before_is_used(stopped, whole, capfd, file, damage):
    path = stopped / f"{file}.safetensors"
    damaged = DAMAGE[damage](path.read_bytes())
    path.write_bytes(damaged)
    last = (stopped / "last.safetensors").read_bytes()
    run_locally({"resume": str(stopped)})
    said = "".join(capfd.readouterr())
    assert (stopped / "last.safetensors.damaged").read_bytes() == last
    assert "continues after round 1" in said
    assert path.name in said
    assert_same_model(stopped, whole)
    assert scores(stopped) == scores(whole)


def test_a_lost_memory_of_the_server_is_noticed(stopped, whole):
    (stopped / f"server-{ROUNDS - 1}.safetensors").unlink()
    run_locally({"resume": str(stopped)})
    assert_same_model(stopped, whole)


def test_a_lost_checkpoint_is_the_round_before(stopped, whole):
    (stopped / "last.safetensors").unlink()
    assert RunFolder.reopen(str(stopped), {}).finished_rounds() == 1
    run_locally({"resume": str(stopped)})
    assert_same_model(stopped, whole)


def test_if_both_are_damaged_the_run_says_so_and_changes_nothing(stopped):
    for name in ("last", "previous"):
        (stopped / f"{name}.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"last.safetensors .*previous.safetensors"):
        run_locally({"resume": str(stopped)})
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("bad", [b"{", b"\xff\xfe", b'{"round": "x"}'])
def test_a_damaged_line_is_set_aside(stopped, whole, capfd, bad):
    rounds = stopped / "rounds.jsonl"
    lines = rounds.read_bytes().split(b"\n")
    rounds.write_bytes(b"\n".join([bad, *lines[1:]]))
    damaged = rounds.read_bytes()
    run_locally({"resume": str(stopped)})
    said = "".join(capfd.readouterr())
    assert (stopped / "rounds.jsonl.damaged").read_bytes() == damaged
    assert "line 1" in said
    assert_same_model(stopped, whole)
    assert scores(stopped) == scores(whole)[1:]


def test_damage_twice_keeps_both(stopped):
    rounds = stopped / "rounds.jsonl"
    for number in range(2):
        rounds.write_bytes(b"%d{\n" % number)
        RunFolder.reopen(str(stopped), {}).restore()
    kept = sorted(path.name for path in stopped.glob("*.damaged*"))
    assert kept == ["rounds.jsonl.damaged", "rounds.jsonl.damaged1"]


def test_the_best_model_survives_the_loss_of_its_line(stopped, whole):
    """A worse round must not become the best because the better one's line is lost."""
    best = read_tensors(whole / "best.safetensors")[1]["round"]
    (stopped / "rounds.jsonl").write_bytes(b"{\n")
    run_locally({"resume": str(stopped)})
    assert read_tensors(stopped / "best.safetensors")[1]["round"] == best


def test_any_change_of_a_tensor_is_noticed(tmp_path):
    path = tmp_path / "model.safetensors"
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1), "c": torch.empty(0)}
    save_tensors(path, state, {"x": "y"})
    found, meta = read_tensors(path)
    assert meta["x"] == "y"
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    content = path.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    for at in range(data, len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 128]) + content[at + 1 :])
        with pytest.raises(UserError, match="damaged"):
            read_tensors(path)
