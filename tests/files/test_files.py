"""A file is the old one or the new one, whatever happens to who writes it."""

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hfedatm_files
from hfedatm_files import PRIVATE, half_written, replacing, write_bytes, write_text

PACKAGES = ("hfedatm_files", "hfedatm_core", "hfedatm", "client_app", "station_app", "server_app")
ROOT = Path(__file__).parents[2]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def synced(monkeypatch):
    """What was brought to the disk, in order, with the bytes that a file then had."""
    seen = []
    real = os.fsync

    def fsync(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        seen.append((path, None if path.is_dir() else path.read_bytes()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def test_a_new_file_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "file.json"
    for content in ("old", "new and longer"):
        write_text(path, content)
        assert path.read_text() == content
    assert os.listdir(tmp_path) == ["file.json"]


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_bytes(b"half of the ne")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_of_the_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


KILLED = """
import os, signal, sys
from pathlib import Path
from hfedatm_files import replacing

with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_bytes(b"half of the ne")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_bytes(path, b"old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (left,) = half_written(tmp_path)
    assert left.read_bytes() == b"half of the ne"


def test_what_a_killed_process_left_goes_when_it_surely_belongs_to_nobody(tmp_path):
    path = tmp_path / "file"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, cwd=ROOT)
    old, young = half_written(tmp_path)
    os.utime(old, (0, 0))
    download = tmp_path / "film.part"  # somebody else's, in a folder that is not ours alone
    download.touch()
    os.utime(download, (0, 0))
    write_bytes(path, b"new")
    assert set(tmp_path.iterdir()) == {path, young, download}


def test_two_writers_at_once_leave_the_file_of_one_of_them(tmp_path):
    path = tmp_path / "file"
    both = threading.Barrier(2)
    contents = [bytes([number]) * (100_000 + number) for number in (1, 2)]

    def write(content: bytes) -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(content[:50_000])
            both.wait(60)  # both have written a half
            with temporary.open("ab") as file:
                file.write(content[50_000:])
            both.wait(60)

    writers = [threading.Thread(target=write, args=[content]) for content in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["file"]


def test_the_content_is_on_the_disk_before_the_name_and_the_name_at_the_end(tmp_path, synced):
    path = tmp_path / "file"
    with replacing(path) as temporary:
        temporary.write_bytes(b"whole")
        assert synced == []
    assert synced == [(temporary, b"whole"), (tmp_path, None)]


def test_a_name_that_another_tool_made_anew_is_synced_too(tmp_path, synced):
    """As safetensors does: it writes a file of its own and renames it."""
    with replacing(tmp_path / "file") as temporary:
        own = tmp_path / "own"
        own.write_bytes(b"whole")
        own.replace(temporary)
    assert synced[0] == (temporary, b"whole")


def test_a_file_that_need_not_survive_a_loss_of_power_waits_for_no_disk(tmp_path, synced):
    write_bytes(tmp_path / "file", b"whole", durable=False)
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert synced == []


def test_nobody_else_reads_a_secret_at_any_time(tmp_path):
    path = tmp_path / "secret"
    before = os.umask(0)
    try:
        with replacing(path, mode=PRIVATE) as temporary:
            assert mode(temporary) == 0o600
            temporary.unlink()
            temporary.write_bytes(b"made anew, for everybody")
        assert mode(path) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600)])
def test_an_ordinary_file_is_for_whom_the_umask_lets(umask, expected, tmp_path):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert mode(tmp_path / "file") == expected


def test_a_file_that_must_be_new_never_replaces_one(tmp_path):
    path = tmp_path / "key"
    write_bytes(path, b"first", overwrite=False)
    with pytest.raises(FileExistsError):
        write_bytes(path, b"second", overwrite=False)
    with pytest.raises(FileExistsError), replacing(tmp_path / "late", overwrite=False) as temporary:
        temporary.write_bytes(b"second")
        (tmp_path / "late").write_bytes(b"first")  # somebody was faster
    assert [path.read_bytes(), (tmp_path / "late").read_bytes()] == [b"first", b"first"]
    assert half_written(tmp_path) == []


def test_whether_a_file_is_new_is_known_where_nothing_can_be_written(tmp_path, monkeypatch):
    path = tmp_path / "policy"
    path.touch()

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FileExistsError):
        write_bytes(path, b"", overwrite=False)


def test_nobody_renames_files_by_himself():
    """The writer is the one place that puts a new file in the place of an old one."""
    sources = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert len(sources) > 100
    others = sources - {Path(hfedatm_files.__file__)}
    marks = ("os.replace(", "os.rename(", ".rename(", "os.link(", "mkstemp", '.part"', '.tmp"')
    found = {str(path): mark for path in others for mark in marks if mark in path.read_text()}
    assert not found


def test_the_writer_needs_the_standard_library_alone():
    program = (
        "import sys, hfedatm_files; print({'torch', 'numpy', 'hfedatm_core'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "set()"
