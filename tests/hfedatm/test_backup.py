"""A machine in one file, and again from it."""

import io
import json
import os
import socket
import sqlite3
import stat
import tarfile

import pytest
from typer.testing import CliRunner

from hfedatm.backup import backup, restore
from hfedatm.base.errors import UserError
from hfedatm.cli.main import typer_app


@pytest.fixture
def parts(tmp_path):
    state, secrets = tmp_path / "here/station-1", tmp_path / "here/secrets"
    (state / "spool").mkdir(parents=True)
    (state / "spool/1-ab.result").write_bytes(b"result")
    (state / "spool/1-ab.asking").touch()
    (state / "spool/x.0123456789abcdef.part").write_bytes(b"half")
    (state / "memory/run-1/client-0").mkdir(parents=True)
    (state / "memory/run-1/client-0/1-1.safetensors").write_bytes(os.urandom(1000))
    (state / "empty").touch()
    secrets.mkdir()
    (secrets / "node").write_bytes(b"key")
    (secrets / "node").chmod(0o600)
    (state / "elsewhere").symlink_to("/etc/hostname")
    return {"state": state, "secrets": secrets}


def there(tmp_path):
    return {"state": tmp_path / "there/station-1", "secrets": tmp_path / "there/secrets"}


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def test_a_machine_comes_back_as_it_was(parts, tmp_path):
    number = backup(tmp_path / "b.tar.gz", parts)
    assert stat.S_IMODE((tmp_path / "b.tar.gz").stat().st_mode) == 0o600
    new = there(tmp_path)
    assert restore(tmp_path / "b.tar.gz", new) == number == 4
    wanted = files(parts["state"])
    for left_out in ("spool/1-ab.asking", "spool/x.0123456789abcdef.part"):
        del wanted[left_out]
    assert files(new["state"]) == wanted
    assert files(new["secrets"]) == {"node": b"key"}
    assert stat.S_IMODE((new["secrets"] / "node").stat().st_mode) == 0o600


def test_a_database_is_copied_as_of_one_moment_while_somebody_writes(parts, tmp_path):
    file = parts["state"] / "link.db"
    writer = sqlite3.connect(file, isolation_level=None)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("CREATE TABLE t (x)")
    writer.execute("INSERT INTO t VALUES (1)")  # only in the journal beside the file
    writer.execute("BEGIN")
    writer.execute("INSERT INTO t VALUES (2)")  # not finished
    backup(tmp_path / "b.tar.gz", parts)
    writer.execute("COMMIT")
    writer.close()
    new = there(tmp_path)
    restore(tmp_path / "b.tar.gz", new)
    assert sqlite3.connect(new["state"] / "link.db").execute("SELECT x FROM t").fetchall() == [(1,)]


def test_a_socket_is_left_out(parts, tmp_path, monkeypatch):
    monkeypatch.chdir(parts["state"])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("prefork")
    assert backup(tmp_path / "b.tar.gz", parts) == 4
    listener.close()


def test_nothing_is_overwritten(parts, tmp_path):
    backup(tmp_path / "b.tar.gz", parts)
    before = files(parts["state"])
    with pytest.raises(UserError, match="move it away first"):
        restore(tmp_path / "b.tar.gz", parts)
    assert files(parts["state"]) == before


def test_accounts_of_privacy_are_not_set_back_unasked(parts, tmp_path):
    accounts = parts["state"] / "memory/.accounts"
    accounts.mkdir()
    (accounts / "a.json").write_text("{}")
    backup(tmp_path / "b.tar.gz", parts)
    new = there(tmp_path)
    with pytest.raises(UserError, match="what later runs have spent is not in them"):
        restore(tmp_path / "b.tar.gz", new)
    assert not new["state"].exists()
    assert restore(tmp_path / "b.tar.gz", new, accounts_are_current=True) == 5


def rewritten(source, target, change):
    """Copy an archive; ``change`` gets each member's name and bytes and returns both."""
    with tarfile.open(source) as old, tarfile.open(target, "w:gz") as new:
        for member in old:
            name, data = change(member.name, old.extractfile(member).read())
            info = tarfile.TarInfo(name)
            info.size = len(data)
            new.addfile(info, io.BytesIO(data))
    return target


def spoil(name, data):
    return name, data[:-1] + b"?" if name == "secrets/node" else data


def lead_elsewhere(name, data):
    if name == "contents.json":
        said = json.loads(data)
        said["files"]["state/../../evil"] = said["files"].pop("secrets/node")
        return name, json.dumps(said).encode()
    return ("state/../../evil" if name == "secrets/node" else name), data


def of_another_version(name, data):
    if name != "contents.json":
        return name, data
    return name, json.dumps(json.loads(data) | {"hfedatm": "99.0.0"}).encode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spoil, "secrets/node is damaged"),
        (lead_elsewhere, "leads elsewhere"),
        (of_another_version, "it has hfedatm 99.0.0"),
        (lambda name, data: (name.replace("contents.json", "x"), data), "is no backup of hfedatm"),
        (lambda name, data: (name.replace("secrets/", "s/"), data), "cannot be restored"),
    ],
)
def test_a_spoilt_archive_changes_nothing(parts, tmp_path, change, said):
    backup(tmp_path / "b.tar.gz", parts)
    file = rewritten(tmp_path / "b.tar.gz", tmp_path / "c.tar.gz", change)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=said):
        restore(file, there(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "there") == before
    assert not any(there(tmp_path)["state"].rglob("*"))


@pytest.mark.parametrize("size", [0, 10, 300])
def test_half_an_archive_is_refused(parts, tmp_path, size):
    backup(tmp_path / "b.tar.gz", parts)
    whole = (tmp_path / "b.tar.gz").read_bytes()
    (tmp_path / "b.tar.gz").write_bytes(whole[:size])
    with pytest.raises(UserError, match="cannot be restored"):
        restore(tmp_path / "b.tar.gz", there(tmp_path))


def test_the_commands(parts, tmp_path):
    run = CliRunner().invoke
    folder = tmp_path / "up"
    parts["state"].rename(tmp_path / "s")
    (folder / "secrets").mkdir(parents=True)
    (tmp_path / "s").rename(folder / "station-1")
    parts["secrets"].rename(folder / "secrets/station-1")
    file = tmp_path / "b.tar.gz"
    place = ["--folder", str(folder)]
    said = run(typer_app, ["backup", str(file), "station-1", *place])
    assert said.output == f"4 files of station-1 are in {file}\n"
    wrong = run(typer_app, ["backup", str(file), "station-2", *place]).exception
    assert isinstance(wrong, UserError) and "station-2" in str(wrong)
    for path in (folder / "station-1", folder / "secrets/station-1"):
        path.rename(tmp_path / f"lost-{path.parent.name}")
    said = run(typer_app, ["restore", str(file), "station-1", *place])
    assert said.output == "restored 4 files of station-1\n"
    assert (folder / "secrets/station-1/node").read_bytes() == b"key"
    elsewhere = run(typer_app, ["restore", str(file), "--folder", str(tmp_path / "x")]).exception
    assert isinstance(elsewhere, UserError) and "--secrets" in str(elsewhere)
