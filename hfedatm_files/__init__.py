"""Write files that appear whole or not at all, even if the process or the machine dies.

A new file is written under a temporary name beside the old one, flushed to the disk, and then
renamed. A reader therefore finds the old file or the new one, never a part of one.

`hfedatm_core` and `hfedatm` both use this package. It needs only the standard library, because the
command line and the processes between tiers must not import torch.
"""

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PUBLIC, PRIVATE = 0o666, 0o600
"""Permissions of a file: readable by all whom the umask allows, or only by its owner."""

ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which a temporary file counts as left by a killed process."""

PARTIAL = ".part"
"""How the name of a file that is being written ends."""

_TEMPORARY = re.compile(r".+\.[0-9a-f]{16}" + re.escape(PARTIAL))


@contextmanager
def replacing(
    path: Path, *, mode: int = PUBLIC, durable: bool = True, overwrite: bool = True
) -> Iterator[Path]:
    """Write a file under a temporary name; it gets its final name when the ``with`` block ends.

    If the block raises, the temporary file is removed and `path` stays as it was. Several processes
    may write the same file at once: the last one to end wins.

    Parameters
    ----------
    path
        The file to write; its folder must exist.
    mode
        Permissions of the new file, reduced by the umask.
    durable
        Whether the file and its name are on the disk when the block has ended. Without this a crash
        of the machine, but not of the process, may leave the file damaged.
    overwrite
        Whether a file that is there already is replaced.

    Yields
    ------
    Path
        An empty file, which the caller fills in any way.

    Raises
    ------
    FileExistsError
        If the file is there and must not be replaced.
    """
    if not overwrite and os.path.lexists(path):  # also in a read-only folder
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        permissions = temporary.stat().st_mode
        yield temporary
        if temporary.stat().st_mode != permissions:  # some libraries replace the file
            temporary.chmod(permissions)
        if durable:
            _sync(temporary)
        if overwrite:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)  # unlike a rename, this fails if the name is taken
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)
    _remove_abandoned(path.parent)


def write_bytes(
    path: Path,
    content: bytes,
    *,
    mode: int = PUBLIC,
    durable: bool = True,
    overwrite: bool = True,
) -> None:
    """Write a whole file; see :func:`replacing`."""
    with replacing(path, mode=mode, durable=durable, overwrite=overwrite) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str, *, mode: int = PUBLIC, overwrite: bool = True) -> None:
    """Write a whole file of UTF-8 text; see :func:`replacing`."""
    write_bytes(path, content.encode(), mode=mode, overwrite=overwrite)


def keep_as(path: Path, name: Path, *, mode: int = PUBLIC) -> None:
    """Give a file a second name, replacing what had it; a copy where the disk has no links."""
    with replacing(name, mode=mode) as temporary:
        temporary.unlink()
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copy2(path, temporary)


def half_written(folder: Path) -> list[Path]:
    """Return the temporary files in a folder, of active writers and of killed ones."""
    return [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk; syncing a file does not flush its name."""
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    limit = time.time() - ABANDONED_AFTER
    for path in half_written(folder):
        with suppress(FileNotFoundError):  # another writer was faster
            if path.stat().st_mtime < limit:
                path.unlink()
