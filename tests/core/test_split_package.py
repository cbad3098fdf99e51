"""A model whose archive is split over packages is checked and unpacked once."""

import hashlib
import io
import zipfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from hfedatm_core import split_package
from hfedatm_core.pretrained import local_folder
from hfedatm_core.split_package import SPLIT_PACKAGES, SplitPackage

FILES = {"vocab.txt": b"a\nb\n", "model.safetensors": b"weights" * 5000, "config.json": b"{}"}


def digest(content):
    return hashlib.sha256(content).hexdigest()


def zipped(files):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, content in {**files, "../evil.py": b"x", "setup.py": b"x"}.items():
            archive.writestr(f"model/{name}", content)
    return memory.getvalue()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install the parts of an archive as two packages; return where they are."""
    monkeypatch.setenv("HFEDATM_CACHE", str(tmp_path / "cache"))
    content = zipped(FILES)
    folders = {"part-1": tmp_path / "one", "part-2": tmp_path / "two"}
    middle = len(content) // 3
    for (_, folder), part in zip(
        folders.items(), (content[:middle], content[middle:]), strict=True
    ):
        folder.mkdir()
        (folder / "x.zip").write_bytes(part)

    def distribution(name):
        if name not in folders:
            raise PackageNotFoundError(name)
        return SimpleNamespace(locate_file=lambda part: folders[name] / part)

    monkeypatch.setattr(split_package, "distribution", distribution)
    return folders


@pytest.fixture
def package():
    files = {name: digest(content) for name, content in FILES.items()}
    return SplitPackage(
        "tried", ("part-1", "part-2"), ("x.zip", "x.zip"), digest(zipped(FILES)), "model", files
    )


@pytest.fixture(autouse=True)
def steady_zip(monkeypatch):
    """Archives of the same files are the same bytes, whenever they are made."""
    monkeypatch.setattr("time.localtime", lambda *_: (2020, 1, 1, 0, 0, 0, 0, 0, 0))


def test_only_the_known_files_are_unpacked_and_only_once(installed, package, monkeypatch):
    folder = package.unpacked()
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == FILES
    monkeypatch.setattr(SplitPackage, "_unpack", lambda *_: pytest.fail("again"))
    assert package.unpacked() == folder
    for part in installed.values():  # unpacked, it no longer needs its packages
        (part / "x.zip").unlink()
    assert package.unpacked() == folder


def test_a_missing_part_means_that_it_is_not_installed(installed, package):
    (installed["part-2"] / "x.zip").unlink()
    assert package.unpacked() is None
    assert replace(package, packages=("part-1", "part-3")).unpacked() is None


def test_a_changed_part_is_refused_before_the_archive_is_read(installed, package, monkeypatch):
    file = installed["part-2"] / "x.zip"
    file.write_bytes(file.read_bytes() + b"x")
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ValueError, match="the archive in part-1 and its parts is not the known"):
        package.unpacked()


def test_a_changed_file_in_the_archive_is_refused(installed, package):
    other = replace(package, files={**package.files, "model.safetensors": digest(b"other")})
    with pytest.raises(ValueError, match="model.safetensors in part-1 is not the known file"):
        other.unpacked()
    assert not list((installed["part-1"].parent / "cache").rglob("model.safetensors"))
    assert not list((installed["part-1"].parent / "cache").rglob("config.json"))


def test_a_model_is_found_by_its_name(installed, package, monkeypatch):
    monkeypatch.setitem(SPLIT_PACKAGES, "tried", package)
    assert local_folder("tried") == package.unpacked()
