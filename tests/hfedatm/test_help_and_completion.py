"""What the command line says of itself: help of everything, and what Tab offers."""

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from hfedatm.base.describing import describe
from hfedatm.base.presets import load_presets
from hfedatm.base.resolving import all_keys
from hfedatm.cli.main import typer_app

COMMANDS = typer.main.get_command(typer_app).commands
NESTED = {
    f"{name} {below}": command
    for name, group in COMMANDS.items()
    for below, command in getattr(group, "commands", {}).items()
}
EXPLAINED = {name: c for name, c in COMMANDS.items() if not hasattr(c, "commands")} | NESTED


@pytest.mark.parametrize("name", EXPLAINED)
def test_help_explains_every_argument_and_gives_an_example(name):
    shown = CliRunner().invoke(typer_app, [*name.split(), "--help"], env={"COLUMNS": "300"})
    assert shown.exit_code == 0
    assert "For example:" in shown.output
    assert f"hfedatm {name}" in shown.output.split("For example:")[1]
    for parameter in EXPLAINED[name].params:
        assert parameter.help, f"{name}: {parameter.name} has no help"
        assert parameter.help in shown.output  # click and typer must agree on where it is kept


def offered(*words):
    """Return what Tab offers after the last word, as bash asks for it."""
    done = subprocess.run(
        [Path(sys.executable).parent / "hfedatm"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ
        | {
            "_HFEDATM_COMPLETE": "complete_bash",
            "COMP_WORDS": "\n".join(["hfedatm", *words]),
            "COMP_CWORD": str(len(words)),
        },
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.split()


@pytest.fixture
def complete():
    """Ask click's machinery in this process; one test below asks as a shell does."""
    from click.shell_completion import ShellComplete

    command = typer.main.get_command(typer_app)

    def ask(*words):
        shell = ShellComplete(command, {}, "hfedatm", "_HFEDATM_COMPLETE")
        return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]

    return ask


def test_commands_and_options(complete):
    assert set(complete("")) == set(COMMANDS)
    assert complete("rep") == ["report", "reproduce", "replace"]
    assert "--config" in complete("run", "--")
    assert set(complete("export", "--model", "")) == {"best", "last"}


def test_settings(complete):
    for command in ("run", "check", "topology", "submit", "audit"):
        assert complete(command, "") == [f"{key}=" for key in all_keys()]
    assert complete("run", "rounds=3", "clients-p") == ["clients-per-station="]
    assert complete("reproduce", "main", "ot-s") == ["ot-solver=", "ot-scope="]


def test_values(complete):
    assert complete("run", "preset=") == [f"preset={name}" for name in sorted(load_presets())]
    assert complete("run", "ot-solver=") == ["ot-solver=sinkhorn", "ot-solver=exact"]
    assert complete("run", "dp-sgd=t") == ["dp-sgd=true"]
    assert complete("run", "rounds=") == ["rounds=5"]  # the default
    assert complete("run", "no-such=") == []


def test_the_keys_of_rules_are_offered_as_the_rules_declare_them(complete):
    for row in describe():
        if row["rules"] and not row["key"].startswith("rule-params="):
            values = [offer.partition("=")[2] for offer in complete("run", f"{row['key']}=")]
            enumerated = " | " in row["allowed"]
            assert values == (row["allowed"].split(" | ") if enumerated else [str(row["default"])])


def test_built_in_names_are_those_that_can_be_used(complete):
    import client_app.methods
    import hfedatm_core.data
    import hfedatm_core.models
    import server_app.rules
    from hfedatm_core.discovery import available

    def names(package):
        found = {info.name.replace("_", "-") for info in pkgutil.iter_modules(package.__path__)}
        return found - {"base"}

    def values(key):
        return {offer.partition("=")[2] for offer in complete("run", f"{key}=")}

    assert values("model") == set(available(hfedatm_core.models, "build"))
    assert values("dataset") == set(available(hfedatm_core.data, "load"))
    assert values("client-method") == names(client_app.methods)
    assert values("server-rule") == names(server_app.rules)
    assert values("track") == {"tensorboard", "mlflow", "wandb"}


def test_bash_which_takes_the_equals_sign_for_a_word(complete):
    assert complete("run", "ot-solver", "=") == ["sinkhorn", "exact"]
    assert complete("run", "lr=0.1", "ot-solver", "=", "ex") == ["exact"]


def test_runs_and_tables(complete, results, tmp_path, monkeypatch):
    (tmp_path / "results").symlink_to(results)
    monkeypatch.chdir(tmp_path)
    for command in ("watch", "report", "compare", "export"):
        assert complete(command, "avg") == ["avg-0", "avg-1"]
    assert complete("compare", "avg-0", "results/h") == ["results/hfedatm-0", "results/hfedatm-1"]
    assert complete("reproduce", "abl") == ["ablation"]


def test_the_shell_gets_it():
    wanted = [f"preset={name}" for name in sorted(load_presets()) if name.startswith("pacs-")]
    assert offered("run", "preset=pacs-") == wanted


def test_a_key_press_does_not_wait_for_torch():
    program = "import sys, hfedatm.cli.main; print(sorted({'torch', 'flwr'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
