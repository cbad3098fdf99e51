"""What is published works elsewhere: the FAB for Flower Hub, the wheel for pip."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MEGABYTE = 1_000_000
# What Flower Hub takes of an app: so many files, so many bytes together and in one file.
HUB_FILES, HUB_BYTES, HUB_FILE_BYTES = 1_000, 10 * MEGABYTE, MEGABYTE


@pytest.fixture(scope="module")
def names() -> list[str]:
    """The files git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [n for n in dict.fromkeys(listed.stdout.split("\0")) if (REPOSITORY / n).is_file()]


@pytest.fixture(scope="module")
def source(names, tmp_path_factory) -> Path:
    """A copy of these files, so that building leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, folder / name)
    return folder


def test_the_repository_is_within_flower_hubs_limits(names):
    assert len(names) < HUB_FILES
    sizes = {name: (REPOSITORY / name).stat().st_size for name in names}
    assert sum(sizes.values()) < HUB_BYTES
    assert not {name: size for name, size in sizes.items() if size >= HUB_FILE_BYTES}


def test_the_fab_is_within_flower_hubs_limits(source):
    done = subprocess.run(
        [BIN / "flwr", "build"],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"FLWR_HOME": str(source / "home")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (fab,) = source.glob("*.fab")
    assert fab.stat().st_size < HUB_BYTES
    with zipfile.ZipFile(fab) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    assert len(sizes) < HUB_FILES
    assert max(sizes.values()) < HUB_FILE_BYTES
    for needed in ("server_app/app.py", "hfedatm_core/data/digits.py", "configs/master-table.yaml"):
        assert needed in sizes
    unwanted = ("tests/", "docs/", "evidence/", "results/")
    assert not [name for name in sizes if name.startswith(unwanted)]


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(source, tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet"]
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path / "wheel", source],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "No matching distribution found for hatchling" in built.stderr:
        pytest.skip("no package index to get the build tool from")
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    for needed in (
        "hfedatm/configs/master-table.yaml",
        "hfedatm/report/templates/page.html.j2",
        "hfedatm/templates/starter/pyproject.toml.j2",
        "hfedatm/templates/model-card.md.j2",
        "hfedatm_core/py.typed",
    ):
        assert needed in names
    # -P and an empty folder: nothing but the wheel's own files can be meant by 'hfedatm'.
    empty = tmp_path / "empty"
    empty.mkdir()
    program = "from hfedatm.cli.main import app; import hfedatm; print(hfedatm.__file__); app()"

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, *arguments],
            cwd=empty,
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        assert str(tmp_path / "site") in done.stdout.splitlines()[0]
        return done.stdout

    assert "Results:" in run("run", "rounds=1", "local-epochs=1", "run-name=there")
    assert (empty / "results" / "there" / "summary.json").is_file()
    run("report", "there")
    assert (empty / "results" / "there" / "report.html").is_file()
    run("init", "starter-project")
    assert (empty / "starter-project" / "config.yaml").is_file()
