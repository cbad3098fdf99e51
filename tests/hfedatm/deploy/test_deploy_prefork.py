"""What a node starts for every message: a fork of a process that is there already."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hfedatm.deploy import flower, prefork

# Takes the place of Flower's own work: says who did it, with what, from which process.
WORK = """
import os, sys
from pathlib import Path
import flwr.supernode.cli

def work():
    done = f"{os.getpid()} {os.getppid()} {'marker' in sys.modules} {os.getcwd()}"
    print("says", os.environ.get("SAYS"), flush=True)
    Path(os.environ["DONE"]).write_text(done)
    sys.exit(int(sys.argv[-1]))

flwr.supernode.cli.flwr_clientapp = work
"""


@pytest.fixture
def node(tmp_path):
    """A process that has started, as a node would, and the environment it gives its commands."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "marker.py").write_text("")
    (modules / "replaced.py").write_text(WORK)
    (modules / "sitecustomize.py").write_text("import replaced\n")
    home = tmp_path / "a home whose path is longer than the address of a socket may be" / ("x" * 60)
    home.mkdir(parents=True)
    places = [str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = flower.environment(home) | {
        prefork.PRELOAD: "marker", prefork.HELPER: str(home), "DONE": str(tmp_path / "done"),
        "PYTHONPATH": os.pathsep.join(places),
    }  # fmt: skip
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process, environment, tmp_path / "done"
        process.kill()
        process.wait()
        until = time.monotonic() + 60
        while left := workers(environment):
            assert time.monotonic() < until, f"{left} outlived the node"
            time.sleep(0.1)


def workers(environment):
    """The processes that wait for work of this node."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            waits = prefork.__name__ in (process.info["cmdline"] or [])
            if waits and process.environ().get("DONE") == environment["DONE"]:
                found.append(process)
        except psutil.Error:
            continue
    ids = {process.pid for process in found}
    return [process for process in found if process.ppid() not in ids]  # a fork is called the same


def message(node, code=0, **options):
    """Have one message handled; return who did it."""
    process, environment, done = node
    done.unlink(missing_ok=True)
    arguments = ["--token", "t", "--parent-pid", str(process.pid), str(code)]
    given = {"env": environment} | options
    subprocess.run(["flwr-clientapp", *arguments], check=True, timeout=120, **given)
    until = time.monotonic() + 60
    while not done.exists() or not done.read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    pid, parent, preloaded = done.read_text().split(" ")[:3]
    return int(pid), int(parent), preloaded == "True"


def test_every_message_is_a_fork_of_one_process_that_has_imported_everything(node):
    one, two = message(node), message(node, code=1)
    (waiting,) = workers(node[1])
    assert one[0] != two[0]
    assert one[1] == two[1] == waiting.pid
    assert one[2] and two[2]


def test_a_process_that_was_killed_is_replaced(node):
    message(node)
    (waiting,) = workers(node[1])
    waiting.kill()
    psutil.wait_procs([waiting], timeout=30)
    assert message(node)[1] != waiting.pid


def test_somebody_who_asks_for_nothing_does_no_harm(node):
    message(node)
    (waiting,) = workers(node[1])
    came_from = Path.cwd()
    os.chdir(node[1]["FLWR_HOME"])
    try:
        for said in (b"", b"no json\n", b"\nno json\n", b"\n[]\n", b'\n{"node": "x"}\n'):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(prefork.ADDRESS)
                connection.sendall(said)
    finally:
        os.chdir(came_from)
    assert message(node)[1] == waiting.pid


def test_if_the_helper_cannot_import_a_module_the_command_does_the_work_itself(node):
    node[1][prefork.PRELOAD] = "a_module_that_is_missing"
    pid, parent, preloaded = message(node)
    assert not preloaded
    assert parent not in {process.pid for process in workers(node[1])}


def test_a_helper_is_there_before_the_first_message(node):
    process, environment, _ = node
    begin = f"from hfedatm.deploy import prefork; prefork.begin({process.pid})"
    for _ in range(2):  # a second one introduces its node to the first
        subprocess.run([sys.executable, "-c", begin], env=environment, check=True, timeout=60)
    wait_for(lambda: len(workers(environment)) == 1)
    (waiting,) = workers(environment)
    assert message(node)[1] == waiting.pid


def test_two_nodes_share_a_helper_and_keep_their_output_folder_and_environment(node, tmp_path):
    log = tmp_path / "log"
    for name in ("one", "two"):
        with log.open("a") as file:
            here = tmp_path / name
            here.mkdir()
            message(node, env=node[1] | {"SAYS": name}, cwd=here, stdout=file)
        assert node[2].read_text().endswith(f"/{name}")
    wait_for(lambda: log.read_text().split() == ["says", "one", "says", "two"])
    assert len(workers(node[1])) == 1


def test_a_helper_that_was_idle_for_long_ends_and_the_next_message_starts_another(node, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text("[limits]\nidle-seconds = 0.1\n")
    node[1]["HFEDATM_POLICY"] = str(policy)
    first = message(node)[1]
    wait_for(lambda: not workers(node[1]))
    assert message(node)[1] != first


def test_a_killed_helper_whose_fork_still_works_is_replaced(node, tmp_path):
    """The lock that only one helper may hold ends with the helper, not with its forks."""
    (tmp_path / "modules/marker.py").write_text(
        "import os, time, flwr.supernode.cli as cli\ndone = cli.flwr_clientapp\n"
        "def work():\n    try:\n        done()\n    finally:\n"
        "        time.sleep(600 if 'SLOW' in os.environ else 0)\n"
        "cli.flwr_clientapp = work\n"
    )
    (tmp_path / "modules/sitecustomize.py").write_text("import replaced, marker\n")
    slow, parent, _ = message(node, env=node[1] | {"SLOW": "1"})
    try:
        psutil.Process(parent).kill()
        wait_for(lambda: not psutil.pid_exists(parent))
        assert psutil.pid_exists(slow)
        assert message(node)[1] != parent
    finally:
        psutil.Process(slow).kill()


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


ENDS = """
import gc, os, subprocess, sys
from pathlib import Path
from hfedatm.deploy import prefork

with subprocess.Popen(["sleep", "600"]) as process:
    freeze = gc.freeze

    def freeze_and_end():
        freeze()
        print(gc.get_freeze_count() > 0)
        process.kill()

    gc.freeze = freeze_and_end
    prefork.serve(Path(sys.argv[1]), process.pid)
print(gc.get_freeze_count())
"""


def test_a_process_that_ends_leaves_nothing_frozen(tmp_path):
    """What is frozen is not collected when Python ends, and some libraries then complain."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)],
        env=os.environ | {prefork.PRELOAD: "json"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "0"]


def test_the_command_answers_where_there_is_no_node():
    environment = os.environ | {"PATH": f"{prefork.COMMANDS}:{Path(sys.executable).parent}"}
    environment["PATH"] += f":{os.environ['PATH']}"
    done = subprocess.run(
        ["flwr-clientapp", "--help"], env=environment, capture_output=True, text=True, check=True
    )
    assert "Run a Flower ClientApp" in done.stdout


LOAD = """
import sys
from hfedatm.deploy.installed_app import run_installed_app_only
from flwr.supernode.runtime import run_clientapp as runtime

if sys.argv[1] == "only":
    run_installed_app_only()
runtime.install_from_fab(open(sys.argv[2], "rb").read(), skip_prompt=True)
load = runtime.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
print(type(load("lab/brought", "1.0.0", sys.argv[3])).__name__, sorted(sys.modules)[-1])
"""


@pytest.mark.parametrize("mode", ["any", "only"])
def test_code_that_a_run_brings_along_is_not_run(mode, tmp_path):
    """Flower itself imports the app of a run: that is what the node is kept from."""
    from hashlib import sha256

    from flwr.cli.build import build_fab_from_disk

    app = tmp_path / "app"
    (app / "client_app").mkdir(parents=True)
    (app / "client_app/__init__.py").write_text("")
    marker = tmp_path / "it-ran"
    (app / "client_app/app.py").write_text(
        "from flwr.clientapp import ClientApp\n"
        f"open({str(marker)!r}, 'w').write('x')\napp = ClientApp()\n"
    )
    (app / "pyproject.toml").write_text(
        '[project]\nname = "brought"\nversion = "1.0.0"\nlicense = "Apache-2.0"\n'
        'description = "x"\n[tool.flwr.app]\npublisher = "lab"\n'
        '[tool.flwr.app.components]\nserverapp = "client_app.app:app"\n'
        'clientapp = "client_app.app:app"\n'
    )
    fab = build_fab_from_disk(app)
    (tmp_path / "app.fab").write_bytes(fab)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, mode, str(tmp_path / "app.fab"), sha256(fab).hexdigest()],
        env=os.environ | {"FLWR_HOME": str(tmp_path / "home"), "HFEDATM_APP": "client_app.app:app"},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert "ClientApp" in done.stdout, done.stderr
    assert marker.exists() == (mode == "any")


def test_the_command_can_be_run_as_it_is_installed():
    assert os.access(prefork.COMMANDS / "flwr-clientapp", os.X_OK)
