"""Fixtures that all tests share: the real data, if present, and a cache for tests only."""

import os
import tarfile
import tempfile
from pathlib import Path

import hypothesis
import pytest
import tomli_w


@pytest.fixture(scope="session", autouse=True)
def _own_cache(pytestconfig):
    """Give tests a cache apart from the user's, which stays from one test run to the next."""
    before = os.environ.get("HFEDATM_CACHE")
    os.environ["HFEDATM_CACHE"] = str(_kept(pytestconfig, "hfedatm-cache"))
    yield
    if before is None:
        del os.environ["HFEDATM_CACHE"]
    else:
        os.environ["HFEDATM_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def _own_config(tmp_path_factory):
    """Give tests a user configuration of their own, whose user is the author of their runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True)
def _own_state(tmp_path_factory, monkeypatch):
    """Give each test an empty folder for the nodes' memory, apart from the user's."""
    monkeypatch.setenv("HFEDATM_STATE", str(tmp_path_factory.mktemp("state")))


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """Return a function that makes this process a deployed node with a policy, or changes it."""

    def write(**sections) -> Path:
        path = tmp_path / "policy.toml"
        named = {name.replace("_", "-"): values for name, values in sections.items()}
        path.write_text(tomli_w.dumps(named))
        monkeypatch.setenv("HFEDATM_POLICY", str(path))
        return path

    return write


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder with the real data sets; the test is skipped if there is none."""
    chosen = os.environ.get("HFEDATM_DATA", "")
    if not chosen or not Path(chosen).is_dir():
        pytest.skip(f"HFEDATM_DATA is {chosen!r}; set it to a folder that has the real data sets")
    return Path(chosen)


@pytest.fixture(scope="session")
def pacs_data(real_data, pytestconfig) -> Path:
    """Folder that holds ``PACS``, unpacked once from ``pacs96.tar``."""
    archive = real_data / "pacs96.tar"
    if not archive.is_file():
        pytest.skip(f"{archive} is not there")
    kept = _kept(pytestconfig, "hfedatm-data")
    folder = kept / f"pacs-{archive.stat().st_size}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=kept) as part, tarfile.open(archive) as tar:
            tar.extractall(part, filter="data")
            unpacked = Path(part) / "unpacked"
            unpacked.mkdir()
            (Path(part) / "PACS").rename(unpacked / "PACS")
            try:
                unpacked.rename(folder)
            except OSError:  # another test process was faster
                if not folder.is_dir():
                    raise
    return folder


@pytest.fixture(scope="session")
def amazon_data(real_data) -> Path:
    """Folder that holds the Amazon reviews."""
    if not list(real_data.glob("amazon*.parquet")):
        pytest.skip(f"there is no amazon*.parquet in {real_data}")
    return real_data


@pytest.fixture(scope="session")
def digits4_data(real_data) -> Path:
    """Folder that holds ``digits4``."""
    if not (real_data / "digits4").is_dir():
        pytest.skip(f"there is no digits4 in {real_data}")
    return real_data


def _kept(config: pytest.Config, name: str) -> Path:
    cache = config.cache
    assert cache is not None, "run the tests without -p no:cacheprovider"
    return cache.mkdir(name)


# The time of an example depends more on the load of the machine than on the code.
hypothesis.settings.register_profile("hfedatm", deadline=None)
hypothesis.settings.load_profile("hfedatm")
