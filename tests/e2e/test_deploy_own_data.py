"""Every site has a folder of its own, which only its owner names, and nothing is dealt."""

from dataclasses import replace

import numpy as np
import pytest
import tomli_w
from deployment import Deployment
from PIL import Image

from hfedatm.deploy import local

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]


def write_site(folder, domain, seed):
    """Write a hundred images of two classes, which differ in brightness."""
    noise = np.random.default_rng(seed)
    for number in range(100):
        image = noise.integers(0, 128, (28, 28), dtype=np.uint8) + 127 * (number % 2)
        path = folder / domain / ("dark", "bright")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.astype(np.uint8)).save(path)
    return folder


@pytest.fixture
def deployment(tmp_path):
    made = Deployment(tmp_path, stations=1, clients=2)
    sites = {f"station-1-client-{n}": write_site(tmp_path / f"site-{n}", f"clinic-{n}", n)
             for n in (1, 2)}  # fmt: skip
    # One owner names the folder in the node's configuration, the other in the policy, which wins.
    named = sites | {"station-1-client-2": tmp_path / "nothing"}
    made.layout.nodes = [
        (machine, above, with_folder(process, named.get(machine.name)))
        for machine, above, process in made.layout.nodes
    ]
    owner = made.folder / "station-1-client-2/policy.toml"
    owner.parent.mkdir(parents=True)
    owner.write_text(tomli_w.dumps({"data": {"folder": str(sites["station-1-client-2"])}}))
    try:
        local.up(made.folder, made.layout, patience=900)
        yield made
    finally:
        made.down()


def with_folder(process, folder):
    """Return a client's node with a folder instead of a share; a station's as it is."""
    if folder is None:
        return process
    place = process.command.index("--node-config") + 1
    command = [*process.command]
    command[place] = f'data-dir="{folder}"'
    return replace(process, command=command)


def test_a_run_on_the_sites_own_folders(deployment, tmp_path):
    target = write_site(tmp_path / "server-only", "clinic-3", 3)
    (only,) = deployment.submit(
        "own", stations=1, clients_per_station=2, rounds=1, station_rounds=1, local_epochs=1,
        dataset="folder", data_dir=target, dataset_params="size=28", target_domain="clinic-3",
        device="cpu",
    ).wait()  # fmt: skip
    assert (only["clients"]["answered"], only["failures"]) == (2, [])
    assert only["source"]["domains"].keys() == {"clinic-1", "clinic-2"}
    assert only["unseen"]["accuracy"] > 0.9
