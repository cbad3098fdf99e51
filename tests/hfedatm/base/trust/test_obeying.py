"""A guarded ClientApp under attack by whoever can send it a task."""

import os
import sys

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from helpers import failures_of, log_lines, run_small, small_settings, tiny_net
from PIL import Image

from client_app.app import app as client_app
from hfedatm.base.building import build_method, build_model
from hfedatm.base.errors import UserError
from hfedatm.base.memory import NodeMemory
from hfedatm.base.plugins import import_object
from hfedatm.base.records import Task, state_to_record
from hfedatm.base.resolving import resolve
from hfedatm.base.trust.policy import Policy
from hfedatm_core.data import DataSpec
from station_app.app import client as station_app

CODE = {"allowed": ["helpers:tiny_data", "helpers:tiny_net"]}
SPEC = DataSpec("image", 3, (1, 8, 8))


def ask(settings, message_type="train", app=client_app, node_config=None, secure=None, **task):
    kind = {"kind": message_type.removeprefix("train.")} | {"round": 1, "station_round": 1}
    made = Task(**(kind | {"client": 0, "settings": settings} | task)).to_record()
    model = build_model_of(settings) if ":" not in settings.model else tiny_net(SPEC)
    content = RecordDict({"task": made, "model": state_to_record(model.state_dict())})
    if secure:
        content["secure"] = ConfigRecord(secure)
    context = Context(0, 1, node_config or {}, RecordDict(), {})
    return app(Message(content, 1, message_type), context).content


def build_model_of(settings):
    spec = DataSpec("image", 10, (1, 32, 32))
    return build_model(settings, spec, build_method(settings.model_copy(update={"train_fn": ""})))


def refusal(reply) -> str:
    assert list(reply) == ["failure"], "it was obeyed"
    (line,) = reply["failure"]["reason"].splitlines()
    return line


# --- code


@pytest.mark.parametrize("app", [client_app, station_app], ids=["client", "station"])
@pytest.mark.parametrize(
    "setting",
    [
        *("dataset", "model", "client-method", "server-rule", "train-fn"),
        *("robust-clients", "robust-stations"),
    ],
)
def test_a_run_cannot_name_code_its_owner_does_not_list(
    policy, tmp_path, monkeypatch, setting, app
):
    """The file's import would leave a mark, and so would calling it."""
    (tmp_path / "mischief.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nrun = print\n")
    monkeypatch.syspath_prepend(tmp_path)
    policy(code=CODE)
    line = refusal(ask(small_settings(**{setting: "mischief:run"}), app=app))
    assert line.startswith(f"PolicyRefusal: {setting}: the run asks for 'mischief:run'")
    assert not (tmp_path / "mark").exists()
    assert "mischief" not in sys.modules


def test_a_shell_command_dressed_up_as_a_data_set_is_not_run(policy, tmp_path):
    policy()
    attack = {"dataset": "os:system", "data-dir": f"touch {tmp_path / 'owned'}", "model": "lenet5"}
    assert "'os:system'" in refusal(ask(resolve(attack)))
    assert not (tmp_path / "owned").exists()


def test_the_gate_holds_whoever_calls(policy):
    policy()
    with pytest.raises(UserError, match="code.allowed"):
        import_object("train-fn", "os:system")


def test_the_gate_holds_for_what_was_found_before_there_was_a_policy(policy):
    settings = small_settings(train_fn="")
    build_method(settings.model_copy(update={"client_method": "client_app.methods.fedavg:FedAvg"}))
    policy(code=CODE)
    with pytest.raises(UserError, match="code.allowed"):
        build_method(
            settings.model_copy(update={"client_method": "client_app.methods.fedavg:FedAvg"})
        )


def test_code_that_the_owner_lists_is_run(policy):
    policy(code=CODE)
    assert "model" in ask(small_settings())


class Point:
    module, attr = "helpers", "tiny_net"


def test_an_installed_entry_point_needs_no_listing(policy, monkeypatch):
    """By its name, and by what it stands for."""
    for module in ("hfedatm.base.plugins", "hfedatm.base.trust.checking"):
        monkeypatch.setattr(
            f"{module}.entry_points",
            lambda group, name="net": [Point] if (group, name) == ("hfedatm.models", "net") else [],
        )
    policy(code={"allowed": ["helpers:tiny_data"]})
    assert "model" in ask(small_settings(model="helpers:tiny_net"))
    from hfedatm.base.networks import _builder

    _builder.cache_clear()
    assert _builder("net", "") is not None


def test_a_training_function_can_be_an_entry_point(policy, monkeypatch):
    monkeypatch.setattr(
        "hfedatm.base.plugins.entry_points",
        lambda group, name: [Point] if (group, name) == ("hfedatm.trainers", "mine") else [],
    )
    policy()
    assert import_object("train-fn", "mine", "hfedatm.trainers") is tiny_net


# --- a policy that is not there


def test_a_node_whose_policy_is_broken_does_nothing_and_says_so(policy):
    path = policy(code=CODE)
    path.write_text("[limits]\nepocs = 1")
    assert "does no work until its owner corrects" in refusal(ask(small_settings()))
    path.unlink()
    for kind in ("train", "train.measure", "evaluate", "train.share", "train.reveal"):
        reply = ask(small_settings(), kind, kind="train")
        assert "does no work" in refusal(reply)


# --- every kind of message is checked


@pytest.mark.parametrize("stage", ["share", "check", "mask", "sign", "reveal"])
def test_the_stages_of_a_secure_sum_are_checked_too(policy, stage):
    policy(limits={"epochs": 1}, code=CODE)
    settings = small_settings(**{"secure-aggregation": True, "local-epochs": 2})
    assert "local-epochs" in refusal(ask(settings, f"train.{stage}", kind="train"))


def test_a_small_cohort_is_refused(policy):
    """Before any work; one that becomes smaller later is refused by the client's secure sum."""
    policy(secure_sum={"required": True, "least-clients": 5}, code=CODE)
    settings = small_settings(**{"secure-aggregation": True})
    secure = {"asked": 4, "session": b"s" * 16, "metrics": ["loss"]}
    assert "5 or more" in refusal(ask(settings, secure=secure))


def test_a_task_must_be_of_the_kind_its_message_says(policy):
    """Asked to train under the name of another kind, a client once sent Grams without noise."""
    policy(privacy={"least-mechanism": "example"}, code=CODE)
    settings = small_settings(**{"privacy.mechanism": "example", "privacy.sigma": 3.0})
    for kind in ("prepare", "evaluate", "measure"):
        assert "cannot ask for" in refusal(ask(settings, kind=kind, send_grams=True))


def test_a_message_without_a_readable_task_is_refused(policy):
    policy(code=CODE)
    context = Context(0, 1, {}, RecordDict(), {})
    for content in (RecordDict(), RecordDict({"task": ConfigRecord({"kind": "train"})})):
        assert refusal(client_app(Message(content, 1, "train"), context).content)


def test_a_node_says_where_it_is_whatever_its_policy(policy):
    policy().unlink()
    context = Context(0, 1, {"partition-id": 3}, RecordDict(), {})
    reply = client_app(Message(RecordDict(), 1, "query"), context).content
    assert reply["node"]["index"] == 3


def test_settings_that_are_not_settings_are_one_line(policy):
    policy(code=CODE)
    context = Context(0, 1, {}, RecordDict(), {})
    for text in ("{", '{"local-epochs": -1, "rounds": -1, "evil": 2}', "[]"):
        task = ConfigRecord({"kind": "train", "settings": text})
        reply = client_app(Message(RecordDict({"task": task}), 1, "train"), context)
        assert "settings are not valid" in refusal(reply.content)


def test_the_line_reaches_the_person_who_started_the_run(tmp_path, monkeypatch):
    """Through station and server; here the clients alone have an owner."""
    owned = Policy.model_validate({"code": CODE, "limits": {"epochs": 1}})
    monkeypatch.setattr("hfedatm.base.trust.obeying.Policy.current", lambda: owned)
    monkeypatch.setattr("hfedatm.runtime.opening.check_policy", lambda *_: None)
    said = "local-epochs: the run asks for 2, the owner of this node allows at most 1"
    with log_lines() as lines, pytest.raises(UserError, match=said):
        run_small(tmp_path, rounds=1, local_epochs=2)
    assert all(said in failure["reason"] for failure in failures_of(tmp_path / "run"))
    assert any(said in line and "left out: station 0" in line for line in lines)


# --- replies


def test_a_reply_that_is_too_large_does_not_leave(policy):
    policy(limits={"reply-mb": 0.001}, code=CODE)
    assert "limits.reply-mb" in refusal(ask(small_settings()))
    policy(limits={"reply-mb": 1.0}, code=CODE)
    assert "model" in ask(small_settings())


# --- folders


def write_images(folder, *domains):
    noise = np.random.default_rng(0)
    for domain in domains:
        for number in range(12):
            path = folder / domain / f"class-{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 255, (8, 8), dtype=np.uint8)).save(path)
    return folder


def own_folder_settings(**given):
    base = {"dataset": "folder", "dataset-params": "size=32", "model": "lenet5"}
    return resolve(base | {"target-domain": "x", "local-epochs": 1, "device": "cpu"} | given)


def ask_for_images(settings, node_config):
    spec = DataSpec("image", 2, (3, 32, 32))
    model = build_model(settings, spec, build_method(settings))
    task = Task("train", settings, 1, station_round=1, client=0).to_record()
    content = RecordDict({"task": task, "model": state_to_record(model.state_dict())})
    return client_app(Message(content, 1, "train"), Context(0, 1, node_config, RecordDict(), {}))


def test_a_run_does_not_choose_the_folder_of_a_deployed_node(policy, tmp_path):
    """Neither with a folder of the owner's nor without one."""
    other = write_images(tmp_path / "other", "secret", "more")
    own = write_images(tmp_path / "own", "clinic")
    settings = own_folder_settings(**{"data-dir": str(other), "validation-fraction": 0})
    policy(data={"folder": str(own)})
    assert ask_for_images(settings, {}).content["metrics"]["num-examples"] == 12
    policy()
    reply = ask_for_images(settings, {}).content
    assert "needs a data directory" in refusal(reply)
    reply = ask_for_images(settings, {"data-dir": str(own)}).content
    assert reply["metrics"]["num-examples"] == 12


def test_the_policys_folder_comes_before_the_node_configs(policy, tmp_path):
    own = write_images(tmp_path / "own", "clinic")
    policy(data={"folder": str(own)})
    reply = ask_for_images(own_folder_settings(), {"data-dir": str(tmp_path / "nothing")}).content
    assert "model" in reply


def test_what_is_in_the_owners_folder_is_not_told(policy, tmp_path, caplog):
    own = write_images(tmp_path / "own", "patient-names")
    policy(data={"folder": str(own)})
    params = {"dataset-params": "size=32,domains=none"}
    line = refusal(ask_for_images(own_folder_settings(**params), {}).content)
    assert "patient-names" not in line and str(own) not in line
    assert "the node's log says why" in line
    assert "patient-names" in caplog.text, "its owner is told"


def test_a_deployed_node_has_the_share_its_owner_gave_it(policy):
    policy(code=CODE)
    settings = small_settings()
    mine = ask(settings, node_config={"partition-id": 1}, client=1)["metrics"]["num-examples"]
    lied = ask(settings, node_config={"partition-id": 1}, client=999)
    assert lied["metrics"]["num-examples"] == mine


# --- names that become paths


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/x", "a/b", "", ".hidden", "x" * 201, "a\0b", "a\n"]
)
def test_a_run_or_a_node_is_never_a_way_out_of_the_state_folder(name):
    with pytest.raises(UserError, match="is not a valid name"):
        NodeMemory(name, "client-0")
    with pytest.raises(UserError, match="is not a valid name"):
        NodeMemory("run", name)


@pytest.mark.parametrize("kind", ["train", "train.share"])
def test_a_run_called_like_a_path_touches_no_file(tmp_path, kind):
    victim = tmp_path / "client-0/secure"
    victim.mkdir(parents=True)
    way_out = os.path.relpath(tmp_path, os.environ["HFEDATM_STATE"])
    settings = small_settings(**{"secure-aggregation": True})
    secure = {"asked": 4, "session": b"s" * 16}
    for run in (way_out, str(tmp_path)):
        reply = ask(settings, kind, kind="train", run=run, secure=secure)
        assert "failure" in reply
    assert list((tmp_path / "client-0").iterdir()) == [victim]
    assert not list(victim.iterdir())
