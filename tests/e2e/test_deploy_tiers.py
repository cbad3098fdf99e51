"""Stations of stations as real Flower processes: the same model as in one process."""

import pytest
from deployment import Deployment
from safetensors.torch import load_file
from test_deploy import assert_close, model_here

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

SMALL = {
    "rounds": 2,
    "station-rounds": 1,
    "local-epochs": 1,
    "batch-size": 64,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    made = Deployment(tmp_path_factory.mktemp("deploy"), tiers=(1, 2, 1))
    try:
        made.up()
        yield made
    finally:
        made.down()


def test_an_inner_station_deploys_and_gives_the_model_of_one_process(deployment, tmp_path):
    rounds = deployment.submit("tree", **SMALL).wait()
    here = model_here(tmp_path, SMALL | {"tiers": "1x2x1"})
    assert_close(load_file(deployment.output / "tree/last.safetensors"), here)
    assert [r["tiers"] for r in rounds] == [
        [{"asked": 1, "answered": 1}, {"asked": 2, "answered": 2}]
    ] * 2
    assert all(r["failures"] == [] for r in rounds)


def test_corrections_of_every_level_deploy(deployment, tmp_path):
    given = SMALL | {"server-rule": "mtgc", "station-rounds": "2x1"}
    rounds = deployment.submit("mtgc", **given).wait()
    assert all(r["failures"] == [] for r in rounds)
    here = model_here(tmp_path, given | {"tiers": "1x2x1"})
    assert_close(load_file(deployment.output / "mtgc/last.safetensors"), here)


def test_a_station_below_a_station_that_dies_is_named_by_its_path(deployment):
    deployment.kill("station-1-2-node")
    given = SMALL | {"rounds": 1, "station-timeout": 300, "join-timeout": 20}
    (only,) = deployment.submit("lost", **given).wait()
    assert only["tiers"][1] == {"asked": 2, "answered": 1}
    assert [f["node"] for f in only["failures"]][:1] == ["station 0, station 1"]
