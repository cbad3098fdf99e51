"""One deployment for all faults: two stations of two clients, whose training a test disturbs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from deployment import Deployment, wait_until
from safetensors.torch import load_file

from hfedatm.deploy import flower

from .staging import SMALL

PLUGINS = Path(__file__).parents[1] / "plugins"
SPOOL_MB = 8


@pytest.fixture(scope="package")
def faults(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="package")
def deployment(tmp_path_factory, faults):
    made = Deployment(
        tmp_path_factory.mktemp("deploy"),
        allowed=["faulty:train"],
        FAULTS=str(faults),
        PYTHONPATH=os.pathsep.join([str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    try:
        with small_disk(made.folder / "station-2/spool"):
            try:
                made.up()
                yield made
            finally:
                made.down()
    finally:
        shutil.rmtree(made.folder, ignore_errors=True)  # databases and logs of many runs


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Give a folder a disk of its own, which a test can fill, if this user may do so."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SPOOL_MB}m,mode=700", "none", str(folder)]
    mounted = shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="package")
def undisturbed(deployment):
    """The model that the same settings give in one process."""
    return in_one_process(deployment)


def in_one_process(deployment, rounds: int = SMALL["rounds"]) -> dict[str, torch.Tensor]:
    given = [f"{key}={value}" for key, value in (SMALL | {"rounds": rounds}).items()]
    given += [f"output={deployment.output}", f"run-name=undisturbed-{rounds}"]
    memory = {"HFEDATM_STATE": str(deployment.output / "here/memory")}
    subprocess.run(
        [str(Path(sys.executable).with_name("hfedatm")), "run", *given],
        env=deployment.environment | memory, check=True, timeout=600,
    )  # fmt: skip
    return load_file(deployment.output / f"undisturbed-{rounds}/last.safetensors")


@pytest.fixture(autouse=True)
def everybody_is_there(deployment, faults):
    """Start again what the test before has killed; a node must stay away for a minute."""
    for file in faults.iterdir():
        file.unlink()
    nodes = {process.name: above for _, above, process in deployment.layout.nodes}
    missing = [name for name in nodes if name not in deployment.processes.living()]
    if missing:
        operator = deployment.folder / "operator"
        for link in {nodes[name] for name in missing}:
            wanted = sum(above == link for above in nodes.values())
            gone = sum(nodes[name] == link for name in missing)
            wait_until(
                lambda n=link, k=wanted - gone: flower.online_nodes(n, operator) <= k,
                "a killed node is seen as gone",
            )
        for name in missing:
            deployment.start(name)
        for link in {nodes[name] for name in missing}:
            wanted = sum(above == link for above in nodes.values())
            wait_until(
                lambda n=link, k=wanted: flower.online_nodes(n, operator) == k,
                "a node that was started again is back",
            )
