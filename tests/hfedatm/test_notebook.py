"""The quickstart notebook runs from top to bottom in an empty folder."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


def test_it_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="install hfedatm[dev]")
    nbclient = pytest.importorskip("nbclient", reason="install hfedatm[dev]")
    pytest.importorskip("ipykernel", reason="install hfedatm[dev]")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "unseen, last round" in printed
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 1
    assert (tmp_path / "report.html").is_file()
    assert {p.name for p in (tmp_path / "results").iterdir()} == {"plain", "noisy"}
