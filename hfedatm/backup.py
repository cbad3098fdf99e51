"""A copy of one machine of a deployment in one file, and the machine again from that file.

The machine may run while it is copied: databases are copied as of one moment, every other file is
only ever replaced whole. A copy holds the machine's secrets, so only its owner may read it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from client_app.ledger import ACCOUNTS
from hfedatm.base.errors import UserError
from hfedatm.base.text import printable
from hfedatm.base.versions import check_version, own_version
from hfedatm_files import PARTIAL, PRIVATE, replacing

Parts = Mapping[str, Path]
"""Files or folders of a machine by name: ``state``, ``secrets``, ``policy``, ``results``."""

_CONTENTS = "contents.json"
_SQLITE = b"SQLite format 3\0"
# Locks and what a killed process left mean nothing elsewhere; a copied database needs no journal.
_LEFT_OUT = (".asking", PARTIAL, "-wal", "-shm", "-journal")
_MOST_CONTENTS = 64 * 2**20


def backup(file: Path, parts: Parts) -> int:
    """Write the parts of a machine into one archive; return the number of files."""
    missing = [str(path) for path in parts.values() if not path.exists()]
    if missing:
        raise UserError(f"{', '.join(missing)}: not there; name the machine and its folders")
    digests: dict[str, str] = {}
    with (
        replacing(file, mode=PRIVATE) as whole,
        tarfile.open(whole, "w:gz") as archive,
        tempfile.TemporaryDirectory(dir=file.resolve().parent) as scratch,
    ):
        for part, root in parts.items():
            for path in _files(root, file.resolve()):
                name = str(PurePosixPath(part, *path.relative_to(root).parts))
                try:
                    steady = _steady(path, Path(scratch))
                    digests[name] = _digest(steady)
                    archive.add(steady, name, recursive=False, filter=_no_names)
                except FileNotFoundError:  # a job was finished meanwhile
                    digests.pop(name, None)
        said = {
            "hfedatm": own_version(),
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": digests,
        }
        contents = Path(scratch) / _CONTENTS
        contents.write_text(json.dumps(said))
        archive.add(contents, _CONTENTS, filter=_no_names)
    return len(digests)


def restore(file: Path, parts: Parts, *, accounts_are_current: bool = False) -> int:
    """Write the parts in an archive to their places; return the number of files.

    Raises
    ------
    UserError
        If something is there already, if the archive is damaged, or if it holds accounts of privacy
        and nobody has said that they are current. Nothing is written then.
    """
    for path in parts.values():
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise UserError(f"{path} is there: move it away first; nothing is overwritten")
    try:
        with tarfile.open(file, "r:*") as archive:
            contents = _contents(archive, file)
            wanted = _wanted(contents["files"], parts, file)
            if not accounts_are_current and any(f"/{ACCOUNTS}/" in name for name in wanted):
                raise UserError(
                    f"{file} holds accounts of privacy as of {printable(contents['made'], 40)}: "
                    "what later runs have spent is not in them. If there were none, say "
                    "--accounts-are-current"
                )
            _unpack(archive, wanted, contents["files"], file)
    except (tarfile.TarError, EOFError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{file} cannot be restored: {printable(error)}") from None
    return len(wanted)


def _files(root: Path, archive: Path) -> Iterator[Path]:
    """Yield the files of a part; a link leads elsewhere and is not followed."""
    if root.is_file():
        yield root
        return
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            path = Path(folder, name)
            regular = path.is_file() and not path.is_symlink()
            if regular and not name.endswith(_LEFT_OUT) and path.resolve() != archive:
                yield path


def _steady(path: Path, scratch: Path) -> Path:
    """Return a copy of a file that does not change while it is read."""
    copy = scratch / "copy"
    copy.unlink(missing_ok=True)
    with path.open("rb") as opened:
        is_database = opened.read(len(_SQLITE)) == _SQLITE
    if not is_database:
        shutil.copy2(path, copy)
        return copy
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as source:
        with closing(sqlite3.connect(copy)) as target:
            source.backup(target)
    copy.chmod(path.stat().st_mode & 0o777)
    return copy


def _no_names(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out whose files they are: on another machine the numbers mean somebody else."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _contents(archive: tarfile.TarFile, file: Path) -> dict[str, dict[str, str]]:
    try:
        member = archive.getmember(_CONTENTS)
        opened = archive.extractfile(member)
        if opened is None or member.size > _MOST_CONTENTS:
            raise KeyError(_CONTENTS)
        found = json.loads(opened.read())
        check_version(found["hfedatm"])
        if not isinstance(found["files"], dict) or not isinstance(found["made"], str):
            raise KeyError("files")
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} is no backup of hfedatm: it lacks {error}") from None
    contents: dict[str, dict[str, str]] = found
    return contents


def _wanted(names: Mapping[str, str], parts: Parts, file: Path) -> dict[str, Path]:
    """Return where each file of the archive belongs."""
    wanted = {}
    for name in names:
        part, *inside = PurePosixPath(name).parts
        if part not in parts:
            raise UserError(f"{file} holds {printable(part, 40)}: say where it belongs, --{part}")
        if ".." in inside or name.startswith("/"):
            raise UserError(f"{file} is no backup of hfedatm: {printable(name)} leads elsewhere")
        wanted[name] = parts[part].joinpath(*inside)
    return wanted


def _unpack(
    archive: tarfile.TarFile, wanted: Mapping[str, Path], digests: Mapping[str, str], file: Path
) -> None:
    """Unpack beside the archive's targets first, so that a damaged archive changes nothing."""
    near = next(iter(wanted.values()), file).parent
    while not near.is_dir():
        near = near.parent
    with tempfile.TemporaryDirectory(dir=near, prefix=".restoring-") as scratch:
        for number, name in enumerate(wanted):
            member = archive.getmember(name)
            if not member.isreg():
                raise ValueError(f"{printable(name)} is not a file")
            member.name = str(number)
            archive.extract(member, scratch, filter="data")
            if _digest(Path(scratch, str(number))) != digests[name]:
                raise ValueError(f"{printable(name)} is damaged")
        for number, target in enumerate(wanted.values()):
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.move(Path(scratch, str(number)), target)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
