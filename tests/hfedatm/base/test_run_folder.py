"""The results folder, and resuming: killed at any moment, the run ends with the same model."""

import json

import pytest
import torch
from helpers import (
    SMALL,
    Saboteur,
    assert_same_model,
    failures_of,
    last_model,
    lines_of,
    run_small,
    small_settings,
)
from safetensors import safe_open

import hfedatm.base.checkpoints
import hfedatm.runtime.local as local
from hfedatm.base.errors import UserError
from hfedatm.base.resolving import as_config
from hfedatm.base.results import RunFolder
from hfedatm.base.trust import authorship
from hfedatm.runtime.local import run_locally

ROUNDS = 3
STATEFUL = {
    "fedavg": {"client_method": "fedavg"},
    "fedsr: memory of clients": {"client_method": "fedsr"},
    "fediir: shared by the server": {"client_method": "fediir", "client_params": "gamma=1"},
    "fediir: shared in the station": {
        "client_method": "fediir",
        "client_params": "gamma=1,level=station",
    },
    "half of the clients": {"client_method": "fedsr", "client_fraction": 0.5},
}


class Killed(BaseException):
    """Not an Exception: nothing in the run may catch and survive it."""


def resume(folder, **given):
    return run_locally({"resume": str(folder), **given})


def without_times(records):
    def strip(value):
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if not k.endswith("seconds")}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return strip(records)


class TestFiles:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        return run_small(tmp_path_factory.mktemp("results"), rounds=ROUNDS, seed=7)

    def test_all_are_there(self, folder):
        names = {path.name for path in folder.iterdir() if path.is_file()}
        assert names == {
            "config.json", "rounds.jsonl", "summary.json", "last.safetensors", "best.safetensors",
            f"server-{ROUNDS}.safetensors",  # the mean that stations would go on from
            "previous.safetensors", f"server-{ROUNDS - 1}.safetensors",
        }  # fmt: skip

    def test_config_has_settings_versions_and_seed(self, folder):
        config = json.loads((folder / "config.json").read_text())
        assert config["settings"]["seed"] == 7
        assert config["settings"]["run-name"] == "run"
        assert config["settings"] == as_config(
            small_settings(rounds=ROUNDS, seed=7, run_name="run", output=str(folder.parent))
        )
        assert {"python", "hfedatm", "flwr", "torch", "numpy"} <= config["versions"].keys()

    def test_rounds_are_one_json_line_each_with_the_agreed_keys(self, folder):
        lines = (folder / "rounds.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [r["round"] for r in records] == [1, 2, 3]
        for record in records:
            assert {
                "round", "failures", "bytes_up", "stations", "clients", "per_station", "loss",
                "merge", "moved", "source", "unseen", "seconds", "train_seconds",
            } <= record.keys()  # fmt: skip
            assert record["unseen"]["domain"] == "c"
            assert record["stations"] == {"asked": 2, "answered": 2}
            assert record["clients"] == {"answered": 4}
            assert len(record["per_station"]) == 2
            assert record["bytes_up"]["stations"] == sum(
                station["bytes_up"] for station in record["per_station"]
            )
            assert set(record["merge"]) >= {"reference", "stations", "layers"}

    def test_the_models_are_those_of_the_last_and_the_best_round(self, folder):
        records = lines_of(folder)
        summary = json.loads((folder / "summary.json").read_text())
        best = max(records, key=lambda r: (r["source"]["accuracy"], -r["round"]))
        for name, number in (("last", ROUNDS), ("best", best["round"])):
            with safe_open(folder / f"{name}.safetensors", "pt") as file:
                assert file.metadata()["round"] == str(number)
                assert set(file.keys()) == {
                    f"{layer}.{kind}" for layer in (0, 4, 6) for kind in ("weight", "bias")
                }
        assert summary["rounds"] == ROUNDS
        assert summary["last"]["unseen_accuracy"] == records[-1]["unseen"]["accuracy"]
        assert summary["best_by_source"]["round"] == best["round"]
        assert summary["failures"] == 0

    def test_a_taken_name_is_refused_with_both_ways_out(self, folder):
        with pytest.raises(
            UserError, match="run-name: .* exists; choose another name, or .*resume"
        ):
            run_small(folder.parent, seed=7)

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="output: cannot make"):
            run_small(tmp_path / "file")


def test_a_run_without_a_name_gets_a_telling_one(tmp_path):
    run_locally(SMALL | {"rounds": 1, "output": str(tmp_path)})
    [folder] = tmp_path.iterdir()
    assert folder.name.endswith("hfedatm") or "-hfedatm-" in folder.name


def test_evaluation_can_be_rarer(tmp_path):
    folder = run_small(tmp_path, rounds=4, evaluate_every=3, station_rounds=1)
    assert [r["round"] for r in lines_of(folder) if "source" in r] == [3, 4]


class TestSameSeed:
    def test_same_seed_same_model_and_same_numbers(self, tmp_path):
        one, two = run_small(tmp_path, "one"), run_small(tmp_path, "two")
        assert_same_model(one, two)
        assert without_times(lines_of(one)) == without_times(lines_of(two))

    def test_another_seed_another_model(self, tmp_path):
        one, two = run_small(tmp_path, "one"), run_small(tmp_path, "two", seed=1)
        assert not torch.equal(last_model(one)["4.weight"], last_model(two)["4.weight"])

    def test_a_deleted_run_of_the_same_name_leaves_no_trace(self, tmp_path):
        """What clients remember of it must not reach the new run."""
        options = {"client_method": "fedsr", "client_fraction": 0.5, "station_rounds": 1}
        fresh = run_small(tmp_path, "fresh", **options)
        run_small(tmp_path / "old", "again", rounds=3, seed=5, **options | {"station_rounds": 3})
        again = run_small(tmp_path, "again", **options)
        assert_same_model(fresh, again)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs to compare with, made once each."""
    made = {}

    def of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("whole")
            made[name] = run_small(folder, "whole", rounds=ROUNDS, **STATEFUL[name])
        return made[name]

    return of


class TestResume:
    @pytest.mark.parametrize("name", STATEFUL)
    def test_killed_in_the_middle_of_a_round(self, tmp_path, monkeypatch, whole, name):
        """Killed after some clients of round 2 have trained (and kept what they remember)."""

        trained = 0

        def count(message, reply):
            nonlocal trained
            trained += message.content["task"]["round"] == 2
            return reply

        def stop(self, record, model, server):
            if record.round == 2:
                raise Killed
            save_round(self, record, model, server)

        save_round = RunFolder.save_round
        with monkeypatch.context() as patch:
            patch.setattr(local, "client_app", Saboteur(count, set(range(4))))
            patch.setattr(RunFolder, "save_round", stop)
            with pytest.raises(Killed):
                run_small(tmp_path, rounds=ROUNDS, **STATEFUL[name])
        assert trained >= 4, "clients had trained in the round that was lost"
        resume(tmp_path / "run")
        self.check(tmp_path / "run", whole(name))

    @pytest.mark.parametrize("moment", ["before the model", "before the line", "in the line"])
    @pytest.mark.parametrize("name", ["fedavg", "fediir: shared by the server"])
    def test_killed_while_a_round_is_saved(self, tmp_path, monkeypatch, whole, name, moment):
        real_save, real_append = hfedatm.base.checkpoints.save_tensors, RunFolder._append

        def save(path, state, metadata=None):
            if path.name == "last.safetensors" and metadata["round"] == "2":
                raise Killed
            real_save(path, state, metadata)

        def append(self, record):
            if record.round == 2:
                if moment == "in the line":
                    with (self.path / "rounds.jsonl").open("a") as file:
                        file.write(record.to_line()[:40])
                raise Killed
            real_append(self, record)

        with monkeypatch.context() as patch:
            if moment == "before the model":
                patch.setattr(hfedatm.base.checkpoints, "save_tensors", save)
            else:
                patch.setattr(RunFolder, "_append", append)
            with pytest.raises(Killed):
                run_small(tmp_path, rounds=ROUNDS, **STATEFUL[name])
        done = 1 if moment == "before the model" else 2
        assert RunFolder.reopen(str(tmp_path / "run"), {}).restore()[0] == done
        resume(tmp_path / "run")
        self.check(tmp_path / "run", whole(name))

    def test_killed_before_the_first_round_is_finished(self, tmp_path, monkeypatch, whole):
        def stop(self, record, model, server):
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "save_round", stop)
            with pytest.raises(Killed):
                run_small(tmp_path, rounds=ROUNDS)
        resume(tmp_path / "run")
        self.check(tmp_path / "run", whole("fedavg"))

    def test_a_finished_run_stays_as_it_is(self, tmp_path):
        folder = run_small(tmp_path)
        before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        resume(folder)
        after = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        assert before == after

    def check(self, found, expected):
        assert failures_of(found) == []
        assert_same_model(found, expected)
        assert without_times(lines_of(found)) == without_times(lines_of(expected))
        for name in ("best", "last"):
            with safe_open(found / f"{name}.safetensors", "pt") as one:
                with safe_open(expected / f"{name}.safetensors", "pt") as two:
                    assert one.metadata()["round"] == two.metadata()["round"]
                    for key in two.keys():
                        assert torch.equal(one.get_tensor(key), two.get_tensor(key))
        assert (found / "summary.json").is_file()


class TestResumeSettings:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        return run_small(tmp_path_factory.mktemp("done"), rounds=1, station_rounds=1)

    @pytest.mark.parametrize(
        "key, value, was",
        [
            ("lr", 0.5, "0.05"),
            ("seed", "3", "0"),
            ("preset", "paper", "'demo'"),
        ],
    )
    def test_another_value_is_refused(self, folder, key, value, was):
        with pytest.raises(UserError) as caught:
            resume(folder, **{key: value})
        assert str(caught.value).startswith(f"resume: {key} was {was} when the run started and")

    def test_the_same_value_is_accepted_also_as_text(self, folder):
        resume(folder, rounds="1", lr="0.05", seed=0, model="")

    def test_a_finished_run_is_extended_as_if_it_had_been_longer_from_the_start(self, tmp_path):
        """With a constant schedule; a cosine reaches to the last round, wherever that is."""
        constant = {"schedule": "constant", "client_method": "fedsr"}
        extended = run_small(tmp_path, "extended", rounds=1, **constant)
        resume(extended, rounds=3)
        assert_same_model(extended, run_small(tmp_path, "whole", rounds=3, **constant))
        assert [line["round"] for line in lines_of(extended)] == [1, 2, 3]
        config = json.loads((extended / "config.json").read_text())
        assert config["settings"]["rounds"] == 3
        assert authorship.verifies(config)
        assert json.loads((extended / "summary.json").read_text())["rounds"] == 3

    def test_who_did_not_make_a_run_does_not_become_its_author(self, tmp_path):
        folder = run_small(tmp_path, rounds=1)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {authorship.FIELD: "no"}))
        named = {"dataset": SMALL["dataset"], "model": SMALL["model"]}
        resume(folder, rounds=2, **named)
        assert not authorship.verifies(json.loads((folder / "config.json").read_text()))

    def test_fewer_rounds_than_are_done_are_refused(self, tmp_path):
        folder = run_small(tmp_path, rounds=2, station_rounds=1)
        with pytest.raises(UserError, match="rounds: got 1; 2 rounds are done already"):
            resume(folder, rounds=1)

    def test_a_private_run_is_not_extended(self, tmp_path):
        noise = {"privacy.mechanism": "example", "privacy.sigma": 1.0}
        folder = run_small(tmp_path, rounds=1, station_rounds=1, **noise)
        with pytest.raises(UserError, match="noise was chosen for 1 rounds, and more would spend"):
            resume(folder, rounds=2)
        assert json.loads((folder / "config.json").read_text())["settings"]["rounds"] == 1

    def test_a_misspelt_key_is_refused(self, folder):
        with pytest.raises(UserError, match="ronds: unknown key in settings; did you mean"):
            resume(folder, ronds=1)

    def test_a_folder_that_is_no_run_is_refused(self, tmp_path):
        with pytest.raises(UserError, match="is not a run's folder"):
            resume(tmp_path)


def test_half_a_line_is_not_a_round(tmp_path):
    line = {
        "round": 1,
        "seconds": 1.0,
        "failures": [],
        "bytes_up": {"clients": 1, "stations": 1},
        "stations": {"asked": 2, "answered": 2},
        "clients": {"answered": 4},
        "per_station": [],
    }
    whole = [json.dumps(line | {"round": number}) + "\n" for number in (1, 2)]
    (tmp_path / "rounds.jsonl").write_text("".join(whole) + '{"rou')
    assert [r["round"] for r in lines_of(tmp_path)] == [1, 2]
    assert lines_of(tmp_path / "nowhere") == []
