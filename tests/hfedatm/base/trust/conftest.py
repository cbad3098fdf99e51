"""Secrets of a small tree: a server, a station, two clients."""

import pytest
from flwr.supercore.task_identity import TaskIdentity

from hfedatm.deploy import certificates


@pytest.fixture(scope="session")
def secrets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trust") / "secrets"
    certificates.make_authority(folder)
    for link in ("server", "station-1"):
        certificates.make_task_key(folder / link)
    certificates.enrol(folder, folder / "station-1", "station-1", "server", 0)
    for place in (0, 1):
        name = f"station-1-client-{place + 1}"
        certificates.enrol(folder, folder / name, name, "station-1", place)
    return folder


@pytest.fixture
def be(secrets, monkeypatch, tmp_path):
    """Become one of the machines: its secrets and its state are this process's."""
    # Flower tells a process who it is before it may make a message; here that is us.
    TaskIdentity.task_id = TaskIdentity.node_id = 1
    TaskIdentity.run_id = 77

    def become(machine):
        monkeypatch.setenv("HFEDATM_SECRETS", str(secrets / machine))
        monkeypatch.setenv("HFEDATM_STATE", str(tmp_path / machine))

    return become
