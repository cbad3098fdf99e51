"""What a release brings besides its wheel: the packages it needs, sums, a signature."""

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages():
    command = [sys.executable, str(ROOT / "tools/runtime_packages.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(line.split("==") for line in done.stdout.splitlines())


def test_the_sbom_lists_what_is_needed_and_what_that_needs(packages):
    for name in ("hfedatm", "flwr", "torch", "cryptography", "uvicorn"):
        assert packages[name] == version(name)
    assert "cffi" in packages  # of cryptography
    assert "ray" in packages  # of flwr[simulation]


def test_the_sbom_does_not_list_what_only_developers_need(packages):
    assert not {"pytest", "ruff", "mypy", "mkdocs"} & packages.keys()


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="OpenSSH is not here")
def test_a_signature_is_verified_as_the_page_says(tmp_path):
    """The commands of `make wheel` and of docs/operate.md, and a changed wheel."""

    def run(command, **more):
        return subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, text=True, **more
        )

    page = (ROOT / "docs/operate.md").read_text()
    verify = page.split("<!-- verify -->")[1].split("```bash\n")[1].split("```")[0]
    made = 'ssh-keygen -Y sign -f "$(KEY)" -n hfedatm dist/SHA256SUMS'
    assert made in (ROOT / "Makefile").read_text()
    run("ssh-keygen -q -t ed25519 -N '' -f release -C ''", check=True)
    (tmp_path / "hfedatm-0-py3-none-any.whl").write_bytes(b"wheel")
    run("sha256sum *.whl > SHA256SUMS", check=True)
    run("ssh-keygen -Y sign -f release -n hfedatm SHA256SUMS", check=True)
    run('echo "releases $(cat release.pub)" > allowed_signers', check=True)
    good = run(f"set -e\n{verify}")
    assert good.returncode == 0, good.stderr
    (tmp_path / "hfedatm-0-py3-none-any.whl").write_bytes(b"other")
    assert run(f"set -e\n{verify}").returncode != 0
    run("sha256sum *.whl > SHA256SUMS", check=True)  # by somebody without the key
    assert run(f"set -e\n{verify}").returncode != 0
