"""The systemd units are what systemd and our command accept."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hfedatm.deploy import container

FOLDER = Path(__file__).resolve().parents[3] / "deploy/systemd"
UNITS = sorted(FOLDER.glob("*.service"))


def environment():
    lines = (FOLDER / "hfedatm.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def command(unit):
    """Return the command line that systemd makes of a unit for the machine station-1."""
    [line] = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    line = line.replace("%i", "station-1")
    for name, value in environment().items():
        line = line.replace(f"${{{name}}}", value).replace(f"${name}", value)
    return shlex.split(line)


def test_there_is_a_unit_for_every_process():
    kinds = {"hfedatm-link@", "hfedatm-gateway@", "hfedatm-node@", "hfedatm-monitor"}
    assert {unit.stem for unit in UNITS} == kinds


@pytest.mark.parametrize("kind", ["link", "gateway", "node"])
def test_our_command_understands_a_unit(kind):
    python, *asked = command(FOLDER / f"hfedatm-{kind}@.service")
    assert asked[:2] == ["-m", "hfedatm.deploy.container"]
    found = container.arguments().parse_args(asked[2:])
    assert (found.kind, found.name) == (kind, "station-1")
    assert found.state == Path("/var/lib/hfedatm/station-1")
    assert "$" not in " ".join(asked)
    if kind == "link":
        assert found.host == "127.0.0.1"  # the Control API is for this machine alone


def test_a_link_and_its_gateway_agree_on_an_address():
    addresses = set()
    for kind in ("link", "gateway"):
        _, _, _, *asked = command(FOLDER / f"hfedatm-{kind}@.service")
        addresses.add(container.arguments().parse_args(asked).link_address)
    assert len(addresses) == 1


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_a_unit(unit, tmp_path):
    """With this interpreter in place of the one that an installation puts into /opt."""
    text = re.sub(r"/opt/hfedatm/bin/\w+", sys.executable, unit.read_text())
    file = tmp_path / unit.name.replace("@", "@station-1")
    file.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    file.write_text(text.replace("Restart=always", "Restrat=always"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True
    )
    assert "Restrat" in done.stderr  # it does look
