"""What is used of Flower without a promise: in one module, and there in the installed version."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from hfedatm import flower_internals

ROOT = Path(__file__).parents[2]
PACKAGES = ("hfedatm_files", "hfedatm_core", "hfedatm", "client_app", "station_app", "server_app")
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy")


def private_names(source: str) -> set[str]:
    """Return the modules of Flower that a source imports, by statement or by name, and may not."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "flwr":
            found |= {f"flwr.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if re.fullmatch(r"flwr(\.\w+)+(:\w+)?", node.value) else set()
    return {name for name in found if name.partition(".")[0] == "flwr" and name not in PUBLIC}


def test_the_check_sees_every_way_to_import():
    for line in (
        "import flwr.supercore.task_identity",
        "def f():\n    from flwr.proto.fleet_pb2 import PullMessagesRequest",
        "from flwr import common",
        "import_module('flwr.supernode.cli')",
        "import flwr",
    ):
        assert private_names(line), line
    for line in ("from flwr.app import Message", "import flwrs.proto", "from . import flwr"):
        assert not private_names(line), line


def test_one_module_alone_uses_what_flower_does_not_promise():
    own = Path(flower_internals.__file__)
    sources = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert own in sources and len(sources) > 100
    found = {str(path.relative_to(ROOT)): private_names(path.read_text()) for path in sources}
    assert private_names(own.read_text())
    assert [name for name, modules in found.items() if modules] == ["hfedatm/flower_internals.py"]


def test_every_name_says_why_no_public_one_will_do():
    tree = ast.parse(inspect.getsource(flower_internals)).body
    silent = []
    for statement, after in zip(tree, [*tree[1:], None], strict=True):
        if isinstance(statement, ast.FunctionDef) and not ast.get_docstring(statement):
            silent.append(statement.name)
        if isinstance(statement, ast.Assign):
            told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            silent += [] if told else [ast.unparse(statement)]
    assert not silent


def test_a_process_that_was_identified_can_make_messages():
    flower_internals.identify_process(5)
    try:
        content = RecordDict({"x": ConfigRecord({"a": 1})})
        message = Message(content, dst_node_id=2, message_type=MessageType.TRAIN)
        assert (message.metadata.run_id, message.metadata.src_node_id) == (5, 5)
    finally:
        flower_internals.identify_process()


def test_the_command_is_a_function_of_nothing_and_knows_its_node():
    command = flower_internals.clientapp_command()
    assert not inspect.signature(command).parameters
    module = import_module("flwr.supernode.cli.flwr_clientapp")
    assert "--parent-pid PARENT_PID" in module._parse_args_run_flwr_clientapp().format_help()


def test_the_command_unpacks_and_loads_by_the_two_steps_that_are_replaced():
    """Called in another way, or beside a third step, code of a run could get in."""
    runtime = import_module("flwr.supernode.runtime.run_clientapp")
    unpack, load = runtime.install_from_fab, runtime.get_load_client_app_fn
    assert list(inspect.signature(unpack).parameters) == ["fab_file", "install_dir", "skip_prompt"]
    assert list(inspect.signature(load).parameters) == ["default_app_ref", "app_path", "multi_app"]
    names = inspect.signature(load("", None, True)).parameters
    assert list(names) == ["fab_id", "fab_version", "fab_hash"]
    body = inspect.getsource(runtime.run_clientapp)
    assert [body.count(f"{step.__name__}(") for step in (unpack, load)] == [1, 1]


@pytest.mark.parametrize("gone", ["install_from_fab", "get_load_client_app_fn"])
def test_a_flower_without_one_of_the_steps_is_refused_before_anything_is_replaced(
    gone, monkeypatch
):
    runtime = import_module("flwr.supernode.runtime.run_clientapp")
    before = dict(vars(runtime))
    monkeypatch.delattr(runtime, gone)
    with pytest.raises(RuntimeError, match=gone):
        flower_internals.load_no_app_but(lambda: pytest.fail("nothing is loaded"))
    assert dict(vars(runtime)) == {name: before[name] for name in before if name != gone}


@pytest.mark.parametrize(
    "module", ["supernode.start_client_internal", "supercore.superexec.run_superexec"]
)
def test_a_node_uses_the_replaced_clock_only_to_sleep(module):
    source = inspect.getsource(import_module(f"flwr.{module}"))
    assert set(re.findall(r"\btime\.(\w+)\(", source)) == {"sleep"}


def test_a_node_gets_messages_and_starts_tasks_by_the_functions_that_are_replaced():
    loop = import_module("flwr.supernode.start_client_internal")
    assert inspect.getsource(loop.start_client_internal).count("_pull_and_store_message(") == 1
    run = import_module("flwr.supercore.superexec.run_superexec").run_superexec
    assert inspect.signature(run).bind(
        runtime_api_address="", insecure=True, root_certificates_path=None
    )
    assert inspect.getsource(run).count("register_signal_handlers(") == 1


def test_a_node_without_a_message_is_idle_and_one_with_a_message_is_not(monkeypatch):
    loop = import_module("flwr.supernode.start_client_internal")
    pulled, said = [None, 7, None], []
    monkeypatch.setattr(loop, "_pull_and_store_message", lambda: pulled.pop(0))
    monkeypatch.setattr(loop, "time", loop.time)
    monkeypatch.setattr(flower_internals, "_arrived", SimpleNamespace(set=lambda: said.append(7)))
    flower_internals.supernode_command(idle=lambda: said.append("idle"))
    assert [loop._pull_and_store_message() for _ in range(3)] == [None, 7, None]
    assert said == ["idle", 7, "idle"]


@pytest.mark.parametrize("shown", [True, False])
def test_what_a_serverapp_writes_is_shown_if_that_is_wanted(shown, monkeypatch):
    superexec = import_module("flwr.supercore.superexec.run_superexec")
    monkeypatch.setattr(superexec.AutoExecPlugin, "suppress_output", True)
    specs = []

    def run(**_):
        executor = SimpleNamespace(launch=specs.append)
        plugin = superexec.AutoExecPlugin("127.0.0.1:1", True, None, executor=executor)
        plugin.launch_task("token", SimpleNamespace(type="flwr-serverapp", task_id=1))

    monkeypatch.setattr(superexec, "run_superexec", run)
    monkeypatch.setattr(superexec, "register_signal_handlers", lambda **_: None)
    monkeypatch.setattr(superexec, "time", superexec.time)
    flower_internals.start_tasks("127.0.0.1:1", shown=shown)
    assert [spec.suppress_output for spec in specs] == [not shown]


def test_a_part_that_is_on_its_way_is_asked_for_again_soon():
    moving = import_module("flwr.supercore.inflatable.inflatable_utils")
    flower_internals.look_sooner_for_parts()
    for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
        backoff = inspect.signature(getattr(moving, name)).parameters["initial_backoff"]
        assert backoff.default == flower_internals.LOOK_FOR_PART
    asked = []

    def pull(object_id):
        asked.append(object_id)
        if len(asked) < 4:
            raise moving.ObjectUnavailableError(object_id)
        return b"part"

    assert moving.pull_objects(["a"], pull) == {"a": b"part"}
    assert len(asked) == 4


FIELDS = {
    "PullMessagesRequest": {"node"},
    "PullMessagesResponse": {"messages_list"},
    "PushMessagesRequest": {"node", "messages_list", "message_object_trees"},
    "PullObjectRequest": {"node"},
    "PushObjectRequest": {"node", "object_id", "object_content"},
    "ConfirmMessageReceivedRequest": {"node", "message_object_id"},
    "ObjectTree": {"object_id", "children"},
}


@pytest.mark.parametrize("name", FIELDS)
def test_requests_have_the_fields_that_the_gateway_reads(name):
    fields = getattr(flower_internals, name).DESCRIPTOR.fields_by_name
    assert {*fields} >= FIELDS[name]
    if "node" in FIELDS[name]:
        assert "node_id" in fields["node"].message_type.fields_by_name
    if "messages_list" in FIELDS[name]:
        metadata = fields["messages_list"].message_type.fields_by_name["metadata"].message_type
        assert {*metadata.fields_by_name} >= {
            *("message_id", "run_id", "src_node_id", "dst_node_id", "reply_to_message_id")
        }


def test_a_superlink_answers_where_the_gateway_looks():
    router = import_module("flwr.superlink.routers.fleet.router").router
    served = {route.path for route in router.routes}
    looked_at = {"PULL", "PUSH", "PULL_PART", "PUSH_PART", "CONFIRM"}
    assert {getattr(flower_internals, name) for name in looked_at} <= served


def test_the_other_paths_of_a_node_are_known():
    """Whatever a new version of Flower lets a node do is to be looked at first."""
    router = import_module("flwr.superlink.routers.fleet.router").router
    assert {route.path.removeprefix("/v1/fleet/") for route in router.routes} == {
        *("register-node", "activate-node", "deactivate-node", "unregister-node"),
        *("send-node-heartbeat", "pull-messages", "push-messages", "pull-object", "push-object"),
        *("confirm-message-received", "get-run", "get-fab"),
    }


@pytest.fixture
def link(tmp_path, monkeypatch):
    """A SuperLink's database with a run that has sent two messages to one of two nodes."""
    handlers = import_module("flwr.superlink.servicer.fleet.fleet_handlers")
    for name in ("pull_messages", "confirm_message_received", "push_messages"):
        monkeypatch.setattr(handlers, name, getattr(handlers, name))  # put back afterwards
    file = str(tmp_path / "link.db")
    state = (
        import_module("flwr.server.superlink.linkstate")
        .LinkStateFactory(
            file,
            import_module("flwr.superlink.federation").NoOpFederationManager(),
            import_module("flwr.supercore.object_store").ObjectStoreFactory(file),
        )
        .state()
    )
    constants = import_module("flwr.supercore.constant")
    nodes = [state.create_node("owner", "name", key, 0) for key in (b"one", b"two")]
    for node in nodes:
        state.activate_node(node, 30.0)
    run = state.create_run(
        "app", "1", "hash", {}, constants.NOOP_FEDERATION_ID, None, "owner", "flwr-serverapp"
    )
    inflatable = import_module("flwr.supercore.inflatable.inflatable_object")
    flower_internals.identify_process(run)
    try:
        sent = [Message(RecordDict({"x": ConfigRecord({"a": a})}), nodes[0], "train") for a in "12"]
        for message in sent:
            message.metadata.__dict__["_src_node_id"] = flower_internals.SUPERLINK_NODE
            tree = inflatable.get_object_tree(message)
            message.metadata.__dict__["_message_id"] = tree.object_id
            assert state.store_message_ins(message)
            state.object_store.preregister(run, tree)
    finally:
        flower_internals.identify_process()

    store = state.object_store
    pending = next(task for task in state.get_tasks() if task.run_id == run)
    assert state.claim_task(pending.task_id) and state.activate_task(pending.task_id)

    def pull(node):
        request = flower_internals.PullMessagesRequest(node={"node_id": nodes[node]})
        answer = handlers.pull_messages(request=request, state=state, store=store)
        return [m.metadata.message_id for m in answer.messages_list]

    def confirm(message):
        request = flower_internals.ConfirmMessageReceivedRequest(
            node={"node_id": nodes[0]}, run_id=run, message_object_id=message
        )
        handlers.confirm_message_received(request=request, state=state, store=store)

    def push(message, node=0):
        request = flower_internals.PushMessagesRequest(node={"node_id": nodes[node]})
        reply = request.messages_list.add()
        reply.error.code, metadata = 2, reply.metadata
        metadata.run_id, metadata.reply_to_message_id = run, message
        metadata.src_node_id, metadata.dst_node_id = nodes[node], flower_internals.SUPERLINK_NODE
        metadata.message_id, metadata.message_type = f"reply to {message}", "train"
        request.message_object_trees.add(object_id="0" * 64)
        handlers.push_messages(request=request, state=state)

    names = [m.metadata.message_id for m in sent]
    return SimpleNamespace(
        state=state, store=store, sent=names, pull=pull, confirm=confirm, push=push
    )


def test_flower_hands_a_message_out_once_whether_it_arrives_or_not(link):
    """If a new version of Flower does better, ours may go."""
    assert [*link.pull(0), *link.pull(0)] == link.sent
    assert link.pull(0) == []
    link.confirm(link.sent[0])
    assert link.sent[0] not in link.store


def test_a_message_is_handed_out_until_its_node_has_answered_it(link):
    """The gateway ended when the link had marked both as delivered; then the node ended."""
    flower_internals.hand_out_until_answered()
    first, second = link.sent
    assert [*link.pull(0), *link.pull(0)] == [first, second]
    assert [*link.pull(0), *link.pull(0)] == [first, first]
    link.confirm(first)
    assert link.pull(0) == [first] and first in link.store
    link.push(first)
    assert first not in link.store
    assert link.pull(0) == [second]
    link.push(second)
    assert link.pull(0) == [] and second not in link.store


def test_a_message_is_handed_out_again_to_its_own_node_alone(link):
    flower_internals.hand_out_until_answered()
    [first] = link.pull(0)
    assert link.pull(1) == []
    link.push(first, node=1)
    assert first in link.store


def test_what_was_handed_out_before_the_link_began_again_follows_flowers_rule(link):
    [first] = link.pull(0)
    flower_internals.hand_out_until_answered()
    link.confirm(first)
    assert first not in link.store and link.pull(0) == [link.sent[1]]


def test_a_message_that_nobody_waits_for_is_not_handed_out_again(link, monkeypatch):
    """Its sender has given it up, or its time is over."""
    flower_internals.hand_out_until_answered()
    first, second = [*link.pull(0), *link.pull(0)]
    link.state.delete_messages({first})
    assert link.pull(0) == [second] and first not in link.store
    later = flower_internals.time.time() + 10**6
    monkeypatch.setattr(flower_internals, "time", SimpleNamespace(time=lambda: later))
    assert link.pull(0) == [] and second not in link.store


@pytest.mark.parametrize("name", ["pull_messages", "confirm_message_received", "push_messages"])
def test_a_superlink_answers_nodes_by_the_functions_that_are_replaced(name):
    router = import_module("flwr.superlink.routers.fleet.router")
    assert inspect.getsource(router).count(f"fleet_handlers.{name}(") == 1


def test_a_confirmed_message_is_only_deleted():
    handlers = import_module("flwr.superlink.servicer.fleet.fleet_handlers")
    source = inspect.getsource(handlers.confirm_message_received)
    assert re.findall(r"\bstore\.(\w+)\(", source) == ["delete"]


def test_a_superlink_has_the_number_that_replies_are_for():
    constants = import_module("flwr.common.constant")
    assert flower_internals.SUPERLINK_NODE == constants.SUPERLINK_NODE_ID
