"""Files that appear whole or not at all, whenever a process or the machine dies.

A new file is written under a temporary name beside the old one, brought to the disk, and then
renamed. A reader therefore finds the old file or the new one, never a part of one.

This stands below `hfedatm_core` and `hfedatm`, which both write such files, and needs the standard
library alone: the command line and the processes between tiers do not import torch.
"""

import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PUBLIC, PRIVATE = 0o666, 0o600
"""Who may read a file: whom the umask lets, or its owner alone."""

ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which a temporary file belongs to nobody: its process was killed."""
_TEMPORARY = re.compile(r".+\.[0-9a-f]{16}\.part")


@contextmanager
def replacing(
    path: Path, *, mode: int = PUBLIC, durable: bool = True, overwrite: bool = True
) -> Iterator[Path]:
    """Write a file under a temporary name; it gets its own when the ``with`` block ends.

    If the block raises, the temporary file is removed and `path` stays as it was. Several processes
    may write the same file at once: the last one to end wins.

    Parameters
    ----------
    path
        The file to write; its folder must exist.
    mode
        Permissions of the new file, less what the umask takes away.
    durable
        Whether the file and its name are on the disk when the block has ended. Without this a crash
        of the machine, but not of the process, may leave the file damaged.
    overwrite
        Whether a file that is there already is replaced.

    Yields
    ------
    Path
        An empty file, to be filled by whatever means.

    Raises
    ------
    FileExistsError
        If the file is there and must not be replaced.
    """
    if not overwrite and os.path.lexists(path):  # known even where nothing can be written
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        permissions = temporary.stat().st_mode
        yield temporary
        if temporary.stat().st_mode != permissions:  # some libraries make the file anew
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


def half_written(folder: Path) -> list[Path]:
    """Return the temporary files in a folder: of writers at work, and of those that were killed."""
    return [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk; syncing a file leaves its name out."""
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
