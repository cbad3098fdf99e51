"""All private parts of Flower that this project uses; no other module uses any.

Flower's public modules are ``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp``. The parts used
here may change with any version. When a new one comes out, look here first and run ``make
test-flower``.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from flwr.clientapp import ClientApp
from flwr.proto import fleet_pb2, message_pb2
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.task_identity import TaskIdentity

HASTE = 10.0
"""How many times as often as Flower's SuperNode ours looks for replies in its own process."""
LOOK_FOR_PART = 0.05
"""Seconds after which a part of a message that was not there is asked for again."""
LOOK_FOR_TASK = 1.0
"""Most seconds until a task is noticed that no message has announced, such as a run."""

# --- The identity of a process -------------------------------------------------------------------


def identify_process(number: int = 1) -> None:
    """Tell Flower that this process is the task, run and node of this number.

    A message takes its origin from these numbers and cannot be made without them. Flower's runtimes
    set them before they call an app; the three tiers in one process have no such runtime, and no
    public function does the same.
    """
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = number


# --- The command a node runs for a message -------------------------------------------------------


def clientapp_command() -> Callable[[], None]:
    """Return the function behind the command ``flwr-clientapp``; it reads ``sys.argv``.

    The command is public, but starting it imports Flower and torch once for every message. A
    process that has imported them can fork and call the function instead.
    """
    look_sooner_for_parts()
    command: Callable[[], None] = import_module("flwr.supernode.cli").flwr_clientapp
    return command


def load_no_app_but(load: Callable[[], ClientApp]) -> None:
    """Make the command in this process run the app that ``load`` returns, not the run's own app.

    The command unpacks the app of a run (``install_from_fab``) and imports what its manifest names
    (``get_load_client_app_fn``). Neither step can be switched off. If Flower renames one of them,
    this raises an error, so that a node does no work rather than run unknown code.
    """
    runtime = import_module("flwr.supernode.runtime.run_clientapp")
    replacements = {
        "install_from_fab": lambda *_, **__: None,
        "get_load_client_app_fn": lambda *_, **__: lambda *_: load(),
    }
    for name in replacements:
        if not callable(getattr(runtime, name, None)):
            raise RuntimeError(f"this version of Flower has no {name}: a run's app would run")
    for name, replacement in replacements.items():
        setattr(runtime, name, replacement)


# --- A SuperNode in one process ------------------------------------------------------------------


_arrived = threading.Event()
"""Set when the SuperNode in this process has got a message; Flower itself has no such event."""


def supernode_command(idle: Callable[[], None]) -> Callable[[], None]:
    """Return the function behind the command ``flower-supernode``; it reads ``sys.argv``.

    The command is public. As a function it shares its process with `start_tasks`, and does not
    sleep through what happens there: Flower's loop looks for a reply twice a second only. Whenever
    there was no message for it, it calls ``idle``.
    """
    look_sooner_for_parts()
    import_module("flwr.supernode.main")  # before there is a second thread that imports Flower
    loop = import_module("flwr.supernode.start_client_internal")
    pull = loop._pull_and_store_message

    def pull_and_tell(*given: Any, **named: Any) -> int | None:
        run_id: int | None = pull(*given, **named)
        if run_id is None:
            idle()
        else:
            _arrived.set()
        return run_id

    loop.__dict__["_pull_and_store_message"] = pull_and_tell
    loop.__dict__["time"] = _Clock(lambda seconds: time.sleep(seconds / HASTE))
    command: Callable[[], None] = import_module("flwr.supernode.cli").flower_supernode
    return command


def start_tasks(address: str, ca_file: str | None = None, shown: bool = False) -> None:
    """Start a command for every task of the process at ``address``; return only by an error.

    This is the loop behind Flower's command ``flower-superexec`` (see `hfedatm.deploy.tasks`). In a
    thread it must leave signals alone, and it looks for a task when a message has arrived. What a
    ServerApp writes goes to its SuperLink's database alone, unless it is to be ``shown`` here, too.
    """
    superexec = import_module("flwr.supercore.superexec.run_superexec")
    if not callable(getattr(superexec, "register_signal_handlers", None)):
        raise RuntimeError("this version of Flower starts tasks in another way")

    def wait(_: float) -> None:
        _arrived.wait(LOOK_FOR_TASK)
        _arrived.clear()

    superexec.__dict__["register_signal_handlers"] = lambda **_: None
    superexec.__dict__["time"] = _Clock(wait)
    if shown:
        superexec.AutoExecPlugin.suppress_output = False
    superexec.run_superexec(
        runtime_api_address=address, insecure=ca_file is None, root_certificates_path=ca_file
    )


@dataclass(frozen=True)
class _Clock:
    """Takes the place of the module `time` where Flower only sleeps."""

    sleep: Callable[[float], None]


def look_sooner_for_parts() -> None:
    """Let this process ask again soon for a part of a message that is still on its way.

    A message is listed before its parts have arrived. Flower then waits for a second, which is
    longer than most parts take, and offers no setting.
    """
    moving = import_module("flwr.supercore.inflatable.inflatable_utils")
    for function in (moving.pull_objects, moving.pull_and_inflate_object_from_tree):
        function.__kwdefaults__["initial_backoff"] = LOOK_FOR_PART


# --- A SuperLink in one process ------------------------------------------------------------------


def hand_out_until_answered() -> None:
    """Let the SuperLink in this process hand out a message until its node has answered it.

    A SuperLink marks a message as delivered before its answer leaves, and deletes its parts when
    the node has confirmed them. If the gateway, the connection or the node ends in between, nobody
    has the message; a node that begins again before the run has noticed its absence lets the run
    wait until its timeout. Flower has no hook for another rule. Here a message and its parts stay
    until the reply begins to arrive. A node asks for work only when it has none: if a message for
    it is still unanswered, it has lost that message, and gets it again.

    What was handed out is known to this process alone. A run ends with its SuperLink; if it does
    not, since its process is elsewhere, what was handed out before follows Flower's rule.
    """
    handlers = import_module("flwr.superlink.servicer.fleet.fleet_handlers")
    pull, confirm = handlers.pull_messages, handlers.confirm_message_received
    push = handlers.push_messages
    given: defaultdict[int, dict[str, PullMessagesResponse]] = defaultdict(dict)

    def pull_again(request: Any, state: Any, store: Any) -> PullMessagesResponse:
        answer: PullMessagesResponse = pull(request=request, state=state, store=store)
        own = given[request.node.node_id]
        for message, before in list(own.items()):
            if not _is_awaited(before, state, store):
                own.pop(message, None)
                store.delete(message)
        if not answer.messages_list:
            return next(iter(list(own.values())), answer)
        own[answer.messages_list[0].metadata.message_id] = answer
        return answer

    def confirm_and_keep(request: Any, state: Any, store: Any) -> Any:
        kept = request.message_object_id in given[request.node.node_id]
        return confirm(request=request, state=state, store=_Kept() if kept else store)

    def push_and_delete(request: Any, state: Any) -> Any:
        answer = push(request=request, state=state)
        message = request.messages_list[0].metadata.reply_to_message_id
        if given[request.node.node_id].pop(message, None):
            state.object_store.delete(message)
        return answer

    handlers.__dict__["pull_messages"] = pull_again
    handlers.__dict__["confirm_message_received"] = confirm_and_keep
    handlers.__dict__["push_messages"] = push_and_delete


class _Kept:
    """Takes the place of an object store where Flower only deletes a message that was confirmed."""

    def delete(self, _: str) -> None:
        """Keep it."""


def _is_awaited(given: PullMessagesResponse, state: Any, store: Any) -> bool:
    """Return whether a message is complete, and its sender still waits for the reply."""
    metadata = given.messages_list[0].metadata
    return (
        metadata.message_id in store
        and metadata.created_at + metadata.ttl > time.time()
        and metadata.message_id in state.get_message_ids_from_run_id(metadata.run_id)
    )


# --- The requests between nodes and a SuperLink --------------------------------------------------
# A SuperLink checks which node makes a request, not its content, and Flower has no public hook for
# more. The gateway between the two therefore reads the paths and the messages of requests.

SUPERLINK_NODE = 1
"""The node id of a SuperLink; every reply must be addressed to it."""

PUBLIC_KEY_HEADER = FLEET_HTTP_PUBLIC_KEY_HEADER
"""The header in which a node names its public key (PEM, base64); it signs every request."""

PULL, PUSH = "/v1/fleet/pull-messages", "/v1/fleet/push-messages"
"""Paths at which a node asks for messages and replies."""
PULL_PART, PUSH_PART = "/v1/fleet/pull-object", "/v1/fleet/push-object"
"""Paths for the parts of a message: Flower moves each array in a separate request."""
CONFIRM = "/v1/fleet/confirm-message-received"
"""Path at which a node confirms that it has all parts of a message."""

PullMessagesRequest = fleet_pb2.PullMessagesRequest
"""Names the node that asks for messages."""
PullMessagesResponse = fleet_pb2.PullMessagesResponse
"""Lists the messages that a node was given, if any."""
PushMessagesRequest = fleet_pb2.PushMessagesRequest
"""Names the sender, recipient, original message and parts of a pushed message."""
PullObjectRequest = message_pb2.PullObjectRequest
"""Names the node that receives a part."""
PushObjectRequest = message_pb2.PushObjectRequest
"""Names the part that a node pushes, and gives its size."""
ConfirmMessageReceivedRequest = message_pb2.ConfirmMessageReceivedRequest
"""Names the message that a node confirms; a node may end only its own."""
ObjectTree = message_pb2.ObjectTree
"""Lists the parts of a message."""
