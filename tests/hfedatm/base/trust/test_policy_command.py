"""``hfedatm policy`` and what ``hfedatm up`` gives its machines."""

import importlib.util
import re
from pathlib import Path

import pytest

from hfedatm.base.errors import UserError
from hfedatm.base.trust.policy import Policy, PolicyError, fields
from hfedatm.base.trust.writing import template
from hfedatm.deploy import local


def test_a_new_policy_explains_every_key_and_allows_built_ins_only(hfedatm, tmp_path):
    path = tmp_path / "deep/policy.toml"
    assert hfedatm("policy", "init", path).exit_code == 0
    read = Policy.load(path)
    assert read.is_owners and read.code.allowed == () and read.limits.seconds == 86400
    text = path.read_text()
    assert all(f"{key} = " in text and meaning in text for _, key, _, meaning in fields())


def test_the_defaults_in_a_new_policy_are_the_real_ones(tmp_path):
    """Every commented line, taken at its word, changes nothing."""
    path = tmp_path / "policy.toml"
    path.write_text(template())
    before = Policy.load(path)
    keys = "|".join(key for _, key, *_ in fields())
    text, count = re.subn(rf"^# ({keys}) = (?!no limit)", r"\1 = ", template(), flags=re.M)
    path.write_text(text)
    assert count > 5
    assert Policy.load(path) == before


def test_a_policy_is_never_overwritten(hfedatm, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("[limits]\nepochs = 1\n")
    done = hfedatm("policy", "init", path)
    assert isinstance(done.exception, UserError) and "exists" in str(done.exception)
    assert path.read_text() == "[limits]\nepochs = 1\n"


def test_show_says_what_is_in_force(hfedatm, policy, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = policy(limits={"epochs": 17}, code={"allowed": ["mine:train"]})
    for arguments in ([], [path]):
        shown = hfedatm("policy", "show", *arguments).output
        assert "17" in shown and "mine:train" in shown
        assert all(f"{section}.{key}" in shown for section, key, *_ in fields())
    monkeypatch.delenv("HFEDATM_POLICY")
    assert "everything is allowed" in hfedatm("policy", "show").output


def test_check_says_whether_a_run_would_be_obeyed(hfedatm, policy):
    path = policy(limits={"epochs": 3}, privacy={"least-mechanism": "example"})
    good = ["privacy.mechanism=example", "privacy.epsilon=2", "local-epochs=3"]
    assert "would be obeyed" in hfedatm("policy", "check", path, *good).output
    assert "is a policy" in hfedatm("policy", "check", path).output
    assert (
        "would be obeyed"
        in hfedatm("policy", "check", path, "server-rule=avg", "local-epochs=3").output
    ), "no Grams, no noise on them"
    for bad, said in (
        (["local-epochs=4"], "limits.epochs"),
        ([*good[2:]], "privacy.least-mechanism"),
        ([*good, "train-fn=mine:train"], "code.allowed"),
    ):
        done = hfedatm("policy", "check", path, *bad)
        assert isinstance(done.exception, UserError) and said in str(done.exception)
    path.write_text("[limit]")
    assert isinstance(hfedatm("policy", "check", path).exception, PolicyError)


# --- hfedatm up


def policies(folder: Path) -> dict[str, Policy]:
    return {path.parent.name: Policy.load(path) for path in folder.glob("*/policy.toml")}


def test_up_gives_every_machine_a_policy_and_every_process_its_machines(tmp_path):
    layout = local.plan(tmp_path, 1, 2)
    local.write_policies(tmp_path, layout)
    machines = {"server", "station-1", "station-1-client-1", "station-1-client-2"}
    assert policies(tmp_path).keys() == machines
    nodes = [process for _, _, process in layout.nodes]
    for process in [*layout.links.values(), *nodes]:
        machine = process.name.rpartition("-")[0]
        own = process.environment
        assert own["HFEDATM_POLICY"] == str(tmp_path / machine / "policy.toml")
        assert own["HFEDATM_SECRETS"] == str(tmp_path / "secrets" / machine)
    plain = local.plan(tmp_path, 1, 1, insecure=True)
    assert "HFEDATM_SECRETS" not in plain.nodes[0][2].environment
    assert "HFEDATM_POLICY" in plain.nodes[0][2].environment


def test_up_keeps_what_an_owner_wrote_unless_told(tmp_path):
    layout = local.plan(tmp_path, 1, 1)
    local.write_policies(tmp_path, layout)
    (tmp_path / "station-1/policy.toml").write_text("[limits]\nepochs = 1\n")
    local.write_policies(tmp_path, layout)
    assert policies(tmp_path)["station-1"].limits.epochs == 1
    given = tmp_path / "given.toml"
    given.write_text("[code]\nallowed = ['mine:train']\n")
    local.write_policies(tmp_path, layout, given)
    assert {p.code.allowed for p in policies(tmp_path).values()} == {("mine:train",)}


def test_up_does_not_start_on_a_policy_with_a_mistake(tmp_path):
    given = tmp_path / "given.toml"
    given.write_text("[codes]\n")
    with pytest.raises(PolicyError, match="did you mean 'code'"):
        local.write_policies(tmp_path / "state", local.plan(tmp_path / "state", 1, 1), given)
    assert not (tmp_path / "state").exists()


# --- the reference


def test_the_reference_has_every_key_of_a_policy():
    root = Path(__file__).resolve().parents[4]
    spec = importlib.util.spec_from_file_location("hooks", root / "docs/hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.on_page_markdown((root / "docs/security.md").read_text())
    rows = re.findall(r"^\| `([\w-]+)\.([\w-]+)` \| `(.*?)` \| (.*) \|$", page, flags=re.M)
    assert rows == list(fields())
