"""`hfedatm export`: the model outside its run."""

import json
import shutil

import pytest
import torch
from helpers import small_settings, tiny_data
from safetensors.torch import load_file

import hfedatm.exporting as exporting
from hfedatm.base.batches import Batches
from hfedatm.base.building import build_method, build_model
from hfedatm.base.errors import UserError
from hfedatm.base.evaluation import evaluate
from hfedatm.base.resolving import validate
from hfedatm.exporting import export_run
from hfedatm.runs import read_run
from hfedatm_core.data import DataSpec


def test_the_exported_model_is_as_good_as_the_run_says(results, tmp_path):
    run = read_run(results / "hfedatm-0")
    weights, card, settings = export_run(run, "last", tmp_path)
    stored = validate(json.loads(settings.read_text()))
    data = tiny_data()
    model = build_model(stored, data.spec, build_method(stored))
    model.load_state_dict(load_file(weights))
    found = evaluate(model, Batches(data.domains["c"], data.spec, 64, torch.device("cpu")))
    accuracy = found.correct / found.examples
    assert accuracy == pytest.approx(run.summary["last"]["unseen_accuracy"])
    assert f"{100 * accuracy:.1f} %" in card.read_text()


def test_a_run_of_which_every_round_failed_is_not_exported(results, tmp_path):
    path = tmp_path / "failed"
    shutil.copytree(results / "hfedatm-0", path)
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    kept = [line | {"kept": "0 of 2 stations usable, 1 needed"} for line in lines]
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    for which in ("best", "last"):
        with pytest.raises(UserError, match="no round changed the model; round 1: 0 of 2 stations"):
            export_run(read_run(path), which, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_card_names_the_training_function(results, tmp_path):
    run = read_run(results / "hfedatm-0")
    settings = small_settings(train_fn="mylab.training:train")
    card = exporting.model_card(run, settings, tiny_data().spec, "last")
    assert "mylab.training:train on the clients" in card and "fedavg" not in card
    assert "trained by mylab.training:train, which chooses its optimizer" in card
    assert "sgd" not in card


def test_the_card_of_a_table_describes_vectors(results):
    run, table = read_run(results / "hfedatm-0"), DataSpec("vector", 2, (12,))
    card = exporting.model_card(run, small_settings(), table, "last")
    assert "Input: float vectors of 12 values." in card and "tokens" not in card


def test_the_card_says_what_one_must_know(results, tmp_path):
    _, card, _ = export_run(read_run(results / "hfedatm-0"), "best", tmp_path)
    text = card.read_text()
    for words in (
        "unseen domain (c)",
        "source domains (a, b)",
        "How to use it",
        "Privacy:",
        "1 x 8 x 8",
    ):
        assert words in text


def test_onnx_computes_the_same(results, tmp_path):
    onnx = pytest.importorskip("onnx", reason="install hfedatm[onnx]")
    pytest.importorskip("onnxscript", reason="install hfedatm[onnx]")
    from onnx.reference import ReferenceEvaluator

    files = export_run(read_run(results / "hfedatm-0"), "last", tmp_path, onnx=True)
    assert files[-1].name == "model.onnx"
    onnx.checker.check_model(str(files[-1]))
    settings = small_settings()
    data = tiny_data()
    model = build_model(settings, data.spec, build_method(settings))
    model.load_state_dict(load_file(files[0]))
    session = ReferenceEvaluator(str(files[-1]))
    for size in (1, 5):  # the batch is free
        images = data.domains["c"].inputs[:size]
        (logits,) = session.run(None, {"image": images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(
                torch.from_numpy(logits), model.eval()(images), rtol=1e-4, atol=1e-4
            )


def test_missing_onnx_is_said_before_anything_is_written(results, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'hfedatm\[onnx\]'"):
        export_run(read_run(results / "hfedatm-0"), "last", tmp_path / "out", onnx=True)
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_best_model_says_so(results, tmp_path):
    shutil.copytree(results / "avg-0", tmp_path / "run")
    (tmp_path / "run" / "best.safetensors").unlink()
    with pytest.raises(UserError, match="--model last"):
        export_run(read_run(tmp_path / "run"), "best", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_of_another_version_are_refused(results, tmp_path):
    shutil.copytree(results / "avg-0", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["settings"]["gadget"] = 1
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="another version"):
        export_run(read_run(tmp_path / "run"), "last", tmp_path / "out")


def test_command_prints_the_files(hfedatm, results, tmp_path):
    done = hfedatm("export", results / "avg-0", "--model", "last", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md",
        "model.safetensors",
        "settings.json",
    ]
    assert str(tmp_path / "out" / "README.md") in done.stdout.replace("\n", "")
