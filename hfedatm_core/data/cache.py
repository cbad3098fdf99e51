"""Arrays that are expensive to make, made once and memory-mapped afterwards.

Decoded images and tokenised text are kept in ``$HFEDATM_CACHE`` (default ``~/.cache/hfedatm``). The
file name carries a digest of everything the content depends on, so nothing has to be invalidated.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from hfedatm_core.cache_folder import cache_dir
from hfedatm_files import PRIVATE, replacing

Array = npt.NDArray[np.generic]
logger = logging.getLogger(__name__)


def digest(parts: Iterable[object]) -> str:
    """Return a short hexadecimal digest of a sequence of printable things."""
    state = hashlib.sha256()
    for part in parts:
        state.update(f"{part}\0".encode())
    return state.hexdigest()[:20]


def file_signature(path: Path) -> str:
    """Return a file's size and time of modification, which change when the file is replaced."""
    status = path.stat()
    return f"{status.st_size}:{status.st_mtime_ns}"


def cached_array(
    name: str,
    key: str,
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    fill: Callable[[Array], None],
) -> Array:
    """Return the memory-mapped array of this name and key; ``fill`` writes a missing one.

    Several processes may ask at once: one fills the array while the others wait. No process sees a
    half-written file, because the file gets its name when it is complete. The array is mapped
    copy-on-write, so writing to it never changes the file.
    """
    path = cache_dir() / f"{name}-{key}.npy"
    found = _open(path, shape, dtype)
    if found is not None:
        return found
    with _lock(path):
        found = _open(path, shape, dtype)
        if found is None:
            _write(path, shape, dtype, fill)
            found = _open(path, shape, dtype)
    if found is None:
        raise OSError(f"{path} was written but cannot be read back; is the disk full?")
    return found


def _lock(path: Path) -> AbstractContextManager[object]:
    """Take the lock of a cached file; leaving the ``with`` block gives it back."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(f"{path}.lock").acquire()
    except OSError as error:
        raise PermissionError(
            f"cannot write to the cache folder {path.parent} ({error}); set the environment "
            "variable HFEDATM_CACHE to a folder that can be written"
        ) from error


def _open(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array | None:
    try:
        array: Array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, EOFError, OSError) as error:
        logger.warning("the cached file %s is damaged and is made again: %s", path, error)
        return None
    return array if array.shape == shape and array.dtype == np.dtype(dtype) else None


def _write(
    path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike, fill: Callable[[Array], None]
) -> None:
    with replacing(path, mode=PRIVATE) as part:
        array = np.lib.format.open_memmap(part, mode="w+", dtype=np.dtype(dtype), shape=shape)
        fill(array)
        array.flush()
        del array
