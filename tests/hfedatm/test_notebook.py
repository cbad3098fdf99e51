"""The notebooks run from top to bottom in an empty folder."""

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")


def outputs(path, folder, monkeypatch):
    """Run a notebook and return what it shows."""
    nbformat = pytest.importorskip("nbformat", reason="install hfedatm[dev]")
    nbclient = pytest.importorskip("nbclient", reason="install hfedatm[dev]")
    pytest.importorskip("ipykernel", reason="install hfedatm[dev]")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path, monkeypatch):
    shown = outputs(EXAMPLES / "quickstart.ipynb", tmp_path, monkeypatch)
    assert "unseen, last round" in "".join(output.get("text", "") for output in shown)
    assert len([output for output in shown if "image/png" in output.get("data", {})]) == 1
    assert (tmp_path / "report.html").is_file()
    assert {p.name for p in (tmp_path / "results").iterdir()} == {"plain", "noisy"}


@pytest.mark.slow
def test_merging_checkpoints_runs_and_beats_averaging(tmp_path, monkeypatch):
    shown = outputs(EXAMPLES / "merge-checkpoints.ipynb", tmp_path, monkeypatch)
    lines = "".join(output.get("text", "") for output in shown).splitlines()
    scores = {line[:30].strip(): float(line[30:-1]) for line in lines if line[36:] == " %"}
    assert scores["averaged"] < scores["aligned and averaged"]
    assert scores["aligned and averaged"] < scores["aligned and merged by RegMean"]
    assert (tmp_path / "merged.safetensors").is_file()
