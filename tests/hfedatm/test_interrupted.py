"""A run that is stopped says how it goes on; who watches it knows, and sees how far a round is."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import SMALL, log_lines, run_small, small_settings

from hfedatm.base import presence
from hfedatm.base.errors import UserError
from hfedatm.base.results import RunFolder
from hfedatm.cli import watch
from hfedatm.runs import read_run
from hfedatm.runtime.progress import Progress


@pytest.fixture
def unfinished(results, tmp_path):
    """A run that some process works on: this one."""
    path = tmp_path / "results" / "mine"
    shutil.copytree(results / "hfedatm-0", path)
    (path / "summary.json").unlink()
    config = json.loads((path / "config.json").read_text())
    config["settings"]["rounds"] = 9
    (path / "config.json").write_text(json.dumps(config))
    presence.announce(path)
    return path


def test_ctrl_c_prints_the_command_that_resumes(tmp_path):
    given = SMALL | {"rounds": 500, "run-name": "mine"}
    command = [str(Path(sys.executable).with_name("hfedatm")), "run"]
    here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, *(f"{key}={value}" for key, value in given.items())],
        cwd=tmp_path, env=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # Tests that run in the background of a shell ignore the signal, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as run:  # fmt: skip
        said = []
        for line in run.stdout:
            said.append(line)
            if line.startswith("round   1/500"):
                run.send_signal(signal.SIGINT)
    assert run.returncode == 130, "".join(said)
    assert "of 500. Continue with: hfedatm run resume=results/mine" in said[-1], "".join(said)
    assert "Traceback" not in "".join(said)
    state = read_run(tmp_path / "results/mine")
    assert (state.status, state.why_stopped) == ("stopped", "it was interrupted")


def test_stopped_before_round_1_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save_round", interrupt)
    with log_lines() as lines, pytest.raises(KeyboardInterrupt):
        run_small(tmp_path)
    assert "nothing is kept" in lines[-1]
    assert not (tmp_path / "run").exists()


def test_a_finished_run_leaves_no_note_of_its_process(results):
    for name in (presence.FILE, presence.PROGRESS):
        assert not (results / "hfedatm-0" / name).exists()


def test_watch_says_why_a_run_was_stopped_and_how_it_goes_on(hfedatm, unfinished):
    assert json.loads(hfedatm("watch", unfinished, "--json").stdout)["status"] == "running"
    presence.say_stopped(unfinished, "it was interrupted")
    shown = hfedatm("watch", unfinished)  # it does not wait for more
    words = " ".join(shown.stdout.split())
    assert shown.exit_code == 1
    assert "stopped: it was interrupted; continue with: hfedatm run resume=" in words


def test_a_killed_process_is_known_to_be_gone(unfinished):
    gone = {"host": platform.node(), "pid": os.getpid(), "created": 1.0}  # its id is another's now
    (unfinished / presence.FILE).write_text(json.dumps(gone))
    state = read_run(unfinished)
    assert (state.status, state.why_stopped) == ("stopped", "its process has ended")


def test_a_process_whose_run_was_resumed_elsewhere_writes_nothing(tmp_path, monkeypatch):
    """It computed a round while the run was stopped and resumed."""
    other = {"host": platform.node(), "pid": 1, "created": 1.0}
    save = RunFolder.save_round

    def resumed_meanwhile(folder, record, *rest):
        if record.round == 2:
            (folder.path / presence.FILE).write_text(json.dumps(other))
        save(folder, record, *rest)

    monkeypatch.setattr(RunFolder, "save_round", resumed_meanwhile)
    with pytest.raises(UserError, match="another process continues this run"):
        run_small(tmp_path, rounds=3)
    folder = tmp_path / "run"
    assert RunFolder.reopen(str(folder), {}).finished_rounds() == 1
    assert json.loads((folder / presence.FILE).read_text()) == other


def test_a_process_that_nobody_waited_for_has_ended(unfinished):
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        born = psutil.Process(child.pid).create_time()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie from here on
        said = {"host": platform.node(), "pid": child.pid, "created": born}
        (unfinished / presence.FILE).write_text(json.dumps(said))
        assert read_run(unfinished).why_stopped == "its process has ended"
        assert not presence.lives(unfinished)


@pytest.mark.parametrize(
    "said",
    ["", "{", "[]", '{"host": 3}', json.dumps({"host": "elsewhere", "pid": 1, "created": 0.0})],
)
def test_nothing_is_concluded_from_a_process_that_cannot_be_looked_for(unfinished, said):
    (unfinished / presence.FILE).write_text(said)
    assert read_run(unfinished).status == "running"


def test_watch_waits_for_the_first_run_and_with_next_for_another(tmp_path, monkeypatch, results):
    """Runs appear while it waits; it returns each as soon as it is there."""
    monkeypatch.chdir(tmp_path)
    looks = []

    def sleep(_):
        looks.append(1)
        if len(looks) % 3 == 0:
            name = f"run-{len(looks)}"
            shutil.copytree(results / "hfedatm-0", tmp_path / "results" / name)
            now = time.time() + len(looks)
            os.utime(tmp_path / "results" / name / "config.json", (now, now))

    monkeypatch.setattr(watch.time, "sleep", sleep)
    assert watch._begun(0.1, upcoming=False).name == "run-3"
    assert watch._begun(0.1, upcoming=False).name == "run-3" and len(looks) == 3
    assert watch._begun(0.1, upcoming=True).name == "run-6"


def test_progress_within_a_round_is_noted_and_shown(unfinished, hfedatm):
    assert read_run(unfinished).progress == {}
    said = {"round": 3, "stations": [1, 2], "clients": [5, 8]}
    (unfinished / presence.PROGRESS).write_text(json.dumps(said))
    shown = hfedatm("watch", unfinished, "--once").stdout
    assert "5/8" in shown and "1/2" in shown
    found = json.loads(hfedatm("watch", unfinished, "--json").stdout)
    assert found["round_at_hand"] == {"stations": [1, 2], "clients": [5, 8]}
    (unfinished / presence.PROGRESS).write_text(json.dumps(said | {"round": 2}))
    assert read_run(unfinished).progress == {}, "of a round that is finished"


@pytest.mark.parametrize("text", ["", "{", "3", '{"round": 3}', '{"round": 3, "stations": 1}'])
def test_progress_that_cannot_be_read_is_none(unfinished, text):
    (unfinished / presence.PROGRESS).write_text(text)
    assert read_run(unfinished).progress == {}


def test_a_run_counts_every_training_of_a_round(tmp_path, monkeypatch):
    noted = []
    monkeypatch.setattr("hfedatm.runtime.progress.EVERY", 0.0)
    monkeypatch.setattr(
        "hfedatm.runtime.progress.write_text", lambda _, text: noted.append(json.loads(text))
    )
    run_small(tmp_path, rounds=2)
    for number in (1, 2):
        counts = [n["clients"] for n in noted if n["round"] == number]
        assert counts[0] == [0, 8] and counts[-1] == [8, 8]  # 2 stations x 2 clients x 2 rounds
        assert [n["stations"] for n in noted if n["round"] == number][-1] == [2, 2]
        assert counts == sorted(counts)


def test_what_is_printed_next_does_not_stand_behind_the_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    progress = Progress(tmp_path, small_settings())
    progress._note(at_once=True)
    assert capsys.readouterr().out.endswith("0 of 2 stations are done")
    progress.end()
    assert capsys.readouterr().out == "\r\x1b[K"
    progress._note(at_once=True)  # by a station that is still at work
    assert capsys.readouterr().out == ""
