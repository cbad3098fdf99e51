"""Every setting, file and plug-in is broken once: one clear message, no traceback, no results."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers import SMALL, run_small
from typer.testing import CliRunner

from hfedatm.base.resolving import all_keys
from hfedatm.base.rule_keys import rule_keys
from hfedatm.base.settings import Settings
from hfedatm.cli.main import app, typer_app

PROPERTIES = {
    key: entry
    for model in (Settings, rule_keys())
    for key, entry in model.model_json_schema(by_alias=True)["properties"].items()
}
BY_TYPE = {
    "integer": ["two", "1.5", "nan", "inf", str(2**63), "9" * 30],
    "number": ["many", "nan", "inf", "-inf", "1e400"],
    "boolean": ["perhaps", "2", "nan"],
}
PLUGINS = {
    "model": "build(spec, **params) -> torch.nn.Module",
    "dataset": "load(data_dir, **params) -> DomainData",
    "client-method": "must be a subclass of hfedatm.contracts.method.Method",
    "server-rule": "must be a subclass of hfedatm.contracts.rule.Rule",
    "task": "must be a subclass of hfedatm_core.tasks.base.LearningTask",
    "track": "must be a subclass of hfedatm.contracts.tracker.Tracker",
    "train-fn": "train(model, batches, received, settings)",
    "robust-clients": "must be a subclass of hfedatm_core.robust.rules.base.RobustRule",
    "robust-stations": "must be a subclass of hfedatm_core.robust.rules.base.RobustRule",
}
FREE_TEXT = {
    "preset": ["nonsense"],
    "target-domain": ["nonsense"],
    "dataset-params": ["nonsense", "=3", "nonsense=3", "a b=3"],
    "model-params": ["nonsense", "=3", "nonsense=3"],
    "client-params": ["nonsense", "=3", "nonsense=3"],
    "rule-params": ["nonsense", "=3", "nonsense=3"],
    "device": ["gpu", "cuda:x", "cuda:99"],
    "run-name": ["a/b", "two words", "..", "."],
    "resume": ["/nowhere/at/all"],
    "output": ["/dev/null/results"],
    "data-dir": ["/nowhere/at/all"],
    "train-only": ["nonsense", "last 99", ","],
    "tiers": ["nonsense", "2x", "0x2", "2x-1x2", "7", "2x2x2x2x2x2x2x2x2"],
    "station-models": ["nonsense", "9=lenet5", "0=nonsense", "0", "x=lenet5"],
    "inner-rounds": ["nonsense", "2", "0", "1x1"],
    "lora-params": ["nonsense", "=3", "nonsense=3", "rank=0", "targets=nonsense"],
    "augment": ["nonsense", "no_such_lab:thing", "helpers:nothing", ":"],
    "metrics": ["nonsense", "no_such_lab:thing", "helpers:nothing", ":"],
}
ANYTHING = {"show-metrics"}  # what numbers there are is known only when somebody reports them


def bad_values(key):
    """Return values the setting cannot have, from what it says it allows."""
    entry = PROPERTIES[key]
    if "enum" in entry:
        return ["nonsense", entry["enum"][0].upper() + "?"]
    if key in PLUGINS:
        return ["nonsense", "no_such_lab:thing", "helpers:nothing", "helpers:small_settings", ":"]
    if key in FREE_TEXT:
        return FREE_TEXT[key]
    values = list(BY_TYPE[entry["type"]])
    values += [entry["minimum"] - 1] if "minimum" in entry else []
    values += [entry["maximum"] + 1] if "maximum" in entry else []
    values += [entry["exclusiveMinimum"]] if "exclusiveMinimum" in entry else []
    values += [entry["exclusiveMaximum"]] if "exclusiveMaximum" in entry else []
    return values


def cures(key, value):
    """Return what the message must say is allowed."""
    entry = PROPERTIES[key]
    if "enum" in entry:
        return entry["enum"]
    if key in PLUGINS:
        return {
            "nonsense": ["package.module:name"],
            "no_such_lab:thing": ["cannot import 'no_such_lab'"],
            "helpers:nothing": ["module 'helpers' has no 'nothing'"],
            "helpers:small_settings": [PLUGINS[key]],
            ":": ["package.module:name"],
        }[value]
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    words = {"integer": "integer", "number": "number", "boolean": "boolean"}.get(entry["type"])
    return [] if words is None or any(b in entry for b in bounds) else [words]


@pytest.fixture
def fails(monkeypatch, capsys, tmp_path):
    """Call the command; demand exit code 2 and one message; return it."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hfedatm", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app()
        shown = capsys.readouterr()
        assert ended.value.code == 2, shown
        assert "Traceback" not in shown.out + shown.err
        assert shown.err.startswith("hfedatm: ")
        return shown.err.removeprefix("hfedatm: ")

    return call


@pytest.fixture
def refused(fails, tmp_path):
    """Run the small federation with changes; demand a message and that nothing is left."""

    def call(**changes):
        output = tmp_path / "results"
        given = SMALL | {"rounds": 1, "output": output}
        given |= {key.replace("_", "-"): value for key, value in changes.items()}
        message = fails("run", *(f"{key}={value}" for key, value in given.items()))
        assert not output.exists() or not list(output.iterdir())
        return message

    return call


@pytest.mark.parametrize("key", [key for key in all_keys() if key not in ANYTHING])
def test_every_setting_refuses_what_it_cannot_be(refused, key):
    others = {"data-dir": {"dataset": "pacs"}, "lora-params": {"train-only": "lora"}}
    needed = others.get(key, {})
    for value in bad_values(key):
        message = refused(**needed, **{key: value})
        named = message.split(":")[0]
        assert named == key or (key, named) == ("data-dir", "dataset"), message
        for cure in cures(key, value):
            assert cure in message, message


# --- files


@pytest.mark.parametrize(
    "text", ["rounds: [", "- rounds", "rounds: {a: 1}", "\tx", "1", "rounds: 1\x00"]
)
def test_a_file_of_settings(fails, tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    message = fails("run", "--config", file)
    assert str(file) in message or message.startswith("rounds: got")


def test_a_file_of_settings_in_another_encoding(fails, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_bytes("run-name: é".encode("latin-1"))
    assert f"{file} cannot be read" in fails("run", "--config", file)


@pytest.mark.parametrize(
    "text, cure",
    [
        ("presets: [", "cannot be read"),
        ("presets: {demo: {based-on: nobody}}", "is based on 'nobody', which is not there"),
        ("presets: {demo: {based-on: demo}}", "is based on 'demo', which leads back to it"),
        ("presets: {demo: {ronds: 3}}", "did you mean 'rounds'?"),
        ("presets: {}", "must be one of"),
    ],
)
def test_the_table_of_presets(refused, tmp_path, monkeypatch, text, cure):
    table = tmp_path / "master-table.yaml"
    table.write_text(text)
    monkeypatch.setattr("hfedatm.base.presets._table_path", lambda: table)
    assert cure in refused()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_small(tmp_path_factory.mktemp("finished"), rounds=1)


@pytest.fixture
def spoilt(finished, tmp_path):
    """Return a copy of a run to be resumed, one file of which holds something else."""

    def spoil(name, content):
        folder = tmp_path / "spoilt"
        shutil.copytree(finished, folder)
        (folder / "summary.json").unlink()
        (folder / name).write_bytes(content)
        return folder

    return spoil


BROKEN_FILES = [
    ("config.json", b"{", "config.json cannot be read"),
    ("config.json", b"\xff", "config.json cannot be read"),
    ("config.json", b"[]", "must hold a JSON object"),
    ("config.json", b"{}", "has no 'settings'"),
    ("config.json", b'{"settings": {"ronds": 1}, "id": "x"}', "ronds: unknown key"),
    ("last.safetensors", b"", "last.safetensors cannot be read"),
    ("last.safetensors", b"\x08" + 100 * b"x", "last.safetensors cannot be read"),
]
IDS = [f"{name}-{content[:8]!r}" for name, content, _ in BROKEN_FILES]


@pytest.mark.parametrize("name, content, cure", BROKEN_FILES, ids=IDS)
def test_a_runs_own_files(fails, spoilt, name, content, cure):
    folder = spoilt(name, content)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert cure in fails("run", f"resume={folder}")
    assert before == {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    if name.endswith("safetensors"):
        assert cure in fails("export", folder, "--model", "last")
    elif b"ronds" not in content:
        for command in (["watch", "--once"], ["report"]):
            assert cure in fails(*command, folder)
        assert cure in fails("compare", folder, folder.parent / "other") or name != "config.json"


@pytest.mark.parametrize("content", [b"{\n", b"3\n", b"\xff\n"])
def test_a_line_that_cannot_be_read(fails, spoilt, content):
    """Views name the line; a run goes on without it (test_damaged_checkpoints.py)."""
    folder = spoilt("rounds.jsonl", content)
    for command in (["watch", "--once"], ["report"]):
        assert "rounds.jsonl cannot be read: line 1" in fails(*command, folder)
    assert (folder / "rounds.jsonl").read_bytes() == content


def test_a_run_that_is_not_there(fails, tmp_path):
    for command in ("watch", "report", "export"):
        assert "there is no folder" in fails(command, tmp_path / "none")
    assert "there is no folder" in fails("compare", tmp_path / "none", tmp_path / "nothing")


def test_a_model_that_changed_since_cannot_be_resumed(fails, spoilt):
    folder = spoilt("rounds.jsonl", b"")
    config = json.loads((folder / "config.json").read_text())
    config["settings"] |= {"model-params": "width=5", "rounds": 2}
    (folder / "config.json").write_text(json.dumps(config))
    named = [f"{key}={config['settings'][key]}" for key in ("dataset", "model")]
    assert "does not fit the model" in fails("run", f"resume={folder}", *named)


# --- folders of data


def image(path: Path) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)


def spoil_data(folder: Path, how: str) -> None:
    for domain in "abc":
        for name in ("cat", "dog"):
            for number in range(3):
                image(folder / domain / name / f"{number}.png")
    if how == "missing":
        shutil.rmtree(folder)
    elif how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "no image":
        (folder / "a" / "cat" / "0.png").write_text("not a picture")
    elif how == "half an image":
        whole = (folder / "a" / "cat" / "0.png").read_bytes()
        (folder / "a" / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    elif how == "empty domains":
        for path in folder.rglob("*.png"):
            path.unlink()
    elif how == "a file":
        shutil.rmtree(folder)
        folder.write_text("")


@pytest.mark.parametrize(
    "how, cure",
    [
        ("missing", "there is no folder"),
        ("empty", "<domain>/<class>/<image>"),
        ("a file", "there is no folder"),
        ("no image", "cannot read the image"),
        ("half an image", "cannot read the image"),
        ("empty domains", "no images"),
        ("too few", "clients-per-station"),
    ],
)
def test_a_folder_of_data(refused, tmp_path, how, cure):
    folder = tmp_path / "data"
    spoil_data(folder, how)
    message = refused(dataset="folder", data_dir=folder, clients_per_station=50, model="lenet5")
    assert cure in message


# --- plug-ins

PLUGIN = """
import math, torch
from torch import nn
from dataclasses import dataclass
from hfedatm.contracts import Method
from server_app.rules.avg import Avg
from helpers import tiny_data, tiny_net

def model_raises(spec): return {}[spec.kind]
def model_none(spec): return None
def model_wide(spec): return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
def model_deaf(spec): return nn.Linear(5, 3)
def model_zero(spec): return tiny_net(spec, width=-1)
class Wrapped(nn.Linear):
    def forward(self, x): return {"logits": super().forward(x.flatten(1))}
def model_dict(spec): return Wrapped(64, 3)

def data_raises(data_dir): raise RuntimeError("the scanner is off")
def data_none(data_dir): return None
def data_empty(data_dir): return tiny_data(examples=0)

class AdaptRaises(Method):
    def adapt(self, model): raise KeyError("head")
class MergeRaises(Avg):
    def merge(self, updates, situation): raise KeyError("station 7")
class MergeNone(Avg):
    def merge(self, updates, situation): return None
class MergeShort(Avg):
    def merge(self, updates, situation):
        merged = super().merge(updates, situation)
        merged.state.popitem()
        return merged

class Mismatched(nn.Module):
    def forward(self, x):
        return torch.nn.functional.linear(x, x)
def model_mismatched(spec): return Mismatched()

class LossRaisesLater(Method):
    calls = 0
    def loss(self, model, inputs, targets):
        self.calls += 1
        if self.calls > 1:
            raise ZeroDivisionError("no more")
        return super().loss(model, inputs, targets)
class LossNaNLater(Method):
    calls = 0
    def loss(self, model, inputs, targets):
        self.calls += 1
        return super().loss(model, inputs, targets) * (math.nan if self.calls > 1 else 1)
def train_raises_later(model, batches, received, settings):
    if len(batches) > 1: raise LookupError("no such patient")
    return {"loss": 0.1}
def train_nan_later(model, batches, received, settings):
    return {"loss": math.nan if len(batches) > 1 else 0.1}
def train_nan_weights_later(model, batches, received, settings):
    if len(batches) > 1:
        with torch.no_grad(): next(model.parameters()).fill_(math.nan)
    return {"loss": 0.1}

class LossRaises(Method):
    def loss(self, model, inputs, targets): raise ZeroDivisionError("no targets today")
class LossText(Method):
    def loss(self, model, inputs, targets): return "0.3"
class LossMany(Method):
    def loss(self, model, inputs, targets): return model(inputs).sum(1)
class LossNaN(Method):
    def loss(self, model, inputs, targets): return super().loss(model, inputs, targets) * math.nan
def train_raises(model, batches, received, settings): raise LookupError("no such patient")
def train_text(model, batches, received, settings): return {"loss": "low"}
def train_none(model, batches, received, settings): pass
def train_nan(model, batches, received, settings): return {"loss": math.nan}
def train_nan_weights(model, batches, received, settings):
    with torch.no_grad(): next(model.parameters()).fill_(math.nan)
    return {"loss": 0.1}
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A module of the user's with every mistake; and one per way an import can fail."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lab_of_mistakes.py").write_text(PLUGIN)
    (tmp_path / "lab_syntax.py").write_text("def build(spec)\n    pass\n")
    (tmp_path / "lab_raises.py").write_text("import math\nmath.sqrt(-1)\n")
    (tmp_path / "lab_exits.py").write_text("raise SystemExit('usage: lab')\n")
    (tmp_path / "lab_needs.py").write_text("import surely_not_installed\n")
    yield "lab_of_mistakes"
    sys.modules.pop("lab_of_mistakes", None)


@pytest.mark.parametrize("key", [*PLUGINS])
@pytest.mark.parametrize(
    "module, cure",
    [
        ("lab_syntax", "SyntaxError: expected ':' (lab_syntax.py, line 1)"),
        ("lab_raises", "ValueError: math domain error (<module>, lab_raises.py:2)"),
        ("lab_exits", "SystemExit: usage: lab"),
        ("lab_needs", "No module named 'surely_not_installed'"),
    ],
)
def test_a_plug_in_that_cannot_be_imported(refused, lab, key, module, cure):
    message = refused(**{key: f"{module}:thing"})
    assert message.startswith(f"{key}: ") and cure in message


BEFORE_ROUND_1 = [
    ("model", "model_raises", "KeyError: 'image' (model_raises, lab_of_mistakes.py:"),
    ("model", "model_none", "returned NoneType, not a Module"),
    ("model", "model_wide", "Tensor of shape (2, 7); it must return a Tensor of shape (2, 3)"),
    ("model", "model_deaf", "RuntimeError: "),
    ("model", "model_zero", "RuntimeError: Trying to create tensor with negative dimension"),
    ("model", "model_dict", "turns 2 examples into a dict"),
    ("dataset", "data_raises", "RuntimeError: the scanner is off (data_raises, lab_of_mistakes.py"),
    ("dataset", "data_none", "returned NoneType, not a DomainData"),
    ("dataset", "data_empty", "examples"),
    ("client-method", "AdaptRaises", "KeyError: 'head' (adapt, lab_of_mistakes.py:"),
    ("client-method", "LossRaises", "ZeroDivisionError: no targets today (loss, lab_of_mistakes.p"),
    ("client-method", "LossText", "loss must return a tensor of one number, got a str"),
    ("client-method", "LossMany", "loss must return a tensor of one number, got a Tensor of shape"),
    ("client-method", "LossNaN", "the loss is nan in local epoch 1"),
    ("train-fn", "train_raises", "LookupError: no such patient (train_raises, lab_of_mistakes.py:"),
    ("train-fn", "train_text", "could not convert string to float: 'low'"),
    ("train-fn", "train_none", "must return a dict with a 'loss', got None"),
    ("train-fn", "train_nan", "the loss of one batch is nan"),
    ("train-fn", "train_nan_weights", "not finite"),
]


@pytest.mark.parametrize("key, name, cure", BEFORE_ROUND_1, ids=[n for _, n, _ in BEFORE_ROUND_1])
def test_a_plug_in_that_stops_the_run_leaves_nothing(refused, lab, key, name, cure):
    message = refused(**{key: f"{lab}:{name}"})
    assert cure in message, message
    assert message.startswith(f"{key}: ") or name == "data_empty"


@pytest.mark.parametrize(
    "name, cure",
    [
        ("MergeRaises", "KeyError: 'station 7' (merge, lab_of_mistakes.py:"),
        ("MergeNone", "merge returned NoneType, not a Merged"),
        ("MergeShort", "merge returned a state that differs from the model in"),
    ],
)
def test_a_rule_that_stops_the_run_leaves_its_traceback(fails, lab, tmp_path, name, cure):
    given = SMALL | {"output": tmp_path, "run-name": "run", "server-rule": f"{lab}:{name}"}
    message = fails("run", *(f"{key}={value}" for key, value in given.items()))
    assert message.startswith("server-rule: ") and cure in message
    assert "Traceback (most recent call last)" in (tmp_path / "run" / "errors.txt").read_text()
    assert not (tmp_path / "run" / "last.safetensors").exists()


@pytest.mark.parametrize(
    "key, name, cure",
    [
        (
            "client-method",
            "LossRaisesLater",
            "ZeroDivisionError: no more (loss, lab_of_mistakes.",
        ),
        ("client-method", "LossNaNLater", "the loss is nan in local epoch 1"),
        (
            "train-fn",
            "train_raises_later",
            "LookupError: no such patient (train_raises_later, ",
        ),
        ("train-fn", "train_nan_later", "loss"),
        ("train-fn", "train_nan_weights_later", "not finite"),
    ],
)
def test_what_fails_on_every_client_ends_the_run_after_round_1(
    fails, lab, tmp_path, key, name, cure
):
    """The run ends with the first client's own error; its record says who failed and why."""
    given = SMALL | {"rounds": 3, "output": tmp_path, "run-name": "run", key: f"{lab}:{name}"}
    message = fails("run", *(f"{key}={value}" for key, value in given.items()))
    assert "no round changed the model" in message
    assert "client 0, client 1: " in message and cure in message, message
    [record] = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").open()]
    for client in range(4):
        named = re.compile(rf"client {client}[:,]")
        assert any(named.search(failure["reason"]) for failure in record["failures"])
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_run_that_failed_is_no_success_to_watch_and_fails_again_at_once(fails, lab, tmp_path):
    given = SMALL | {"output": tmp_path, "run-name": "run", "train-fn": f"{lab}:train_raises_later"}
    fails("run", *(f"{key}={value}" for key, value in given.items()))
    shown = CliRunner().invoke(typer_app, ["watch", str(tmp_path / "run"), "--once"])
    assert shown.exit_code == 1 and "finished: no round changed the model" in shown.output
    fails("run", f"resume={tmp_path / 'run'}", "rounds=9")
    assert len((tmp_path / "run/rounds.jsonl").read_text().splitlines()) == 2


def test_the_whole_traceback_is_kept_beside_the_results_once(fails, lab, tmp_path):
    method = f"client-method={lab}:LossRaisesLater"
    small = [f"{key}={value}" for key, value in SMALL.items()]
    fails("run", *small, f"output={tmp_path}", "run-name=run", method)
    text = (tmp_path / "run" / "errors.txt").read_text()
    assert text.count("Traceback (most recent call last)") == 1  # four clients failed alike
    assert "lab_of_mistakes.py" in text and 'raise ZeroDivisionError("no more")' in text
    assert "ZeroDivisionError: no more" in text


def test_an_error_in_a_library_is_placed_in_the_users_code(fails, lab, tmp_path):
    """Torch raises it, many frames further in."""
    small = [f"{key}={value}" for key, value in SMALL.items()]
    message = fails("run", *small, f"output={tmp_path}", f"model={lab}:model_mismatched")
    line = 1 + PLUGIN.splitlines().index("        return torch.nn.functional.linear(x, x)")
    assert f"(forward, lab_of_mistakes.py:{line})" in message
