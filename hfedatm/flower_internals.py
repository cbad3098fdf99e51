"""All that this project uses of Flower without Flower promising it; no other module does.

Flower's public modules are ``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp``. What is here
may change with any version: look here first when a new one comes out, and run ``make test-flower``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from flwr.clientapp import ClientApp
from flwr.proto import fleet_pb2, message_pb2
from flwr.supercore.task_identity import TaskIdentity

# --- Who a process is ----------------------------------------------------------------------------


def identify_process(number: int = 1) -> None:
    """Say that this process is the task, run and node of this number.

    A message takes its origin from there and cannot be made without. Flower's runtimes say it
    before they call an app; the three tiers in one process have no such runtime, and no public name
    does the same.
    """
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = number


# --- What a node runs for a message --------------------------------------------------------------


def clientapp_command() -> Callable[[], None]:
    """Return what the command ``flwr-clientapp`` does with ``sys.argv``.

    The command is public, but starting it imports Flower and torch once for every message. A fork
    of a process that has imported them needs the function.
    """
    command: Callable[[], None] = import_module("flwr.supernode.cli").flwr_clientapp
    return command


def load_no_app_but(load: Callable[[], ClientApp]) -> None:
    """Have the command in this process run the app that ``load`` returns, whatever a run brings.

    The command unpacks the app of a run (``install_from_fab``) and imports what its manifest names
    (``get_load_client_app_fn``). Neither step has a switch. If Flower renames one of them this
    raises, so that a node does nothing rather than anything.
    """
    runtime = import_module("flwr.supernode.runtime.run_clientapp")
    replacements = {
        "install_from_fab": lambda *_, **__: None,
        "get_load_client_app_fn": lambda *_, **__: lambda *_: load(),
    }
    for name in replacements:
        if not callable(getattr(runtime, name, None)):
            raise RuntimeError(f"this version of Flower has no {name}: no app can be kept out")
    for name, replacement in replacements.items():
        setattr(runtime, name, replacement)


# --- What nodes and a SuperLink say to each other ------------------------------------------------
# A SuperLink checks who makes a request, not what it is about, and Flower has no public hook for
# more. The gateway between the two therefore reads the requests: their paths and their messages.

SUPERLINK_NODE = 1
"""The number under which a SuperLink sends and receives messages; a reply must be for it."""

PULL, PUSH = "/v1/fleet/pull-messages", "/v1/fleet/push-messages"
"""Where a node asks for messages, and where it replies."""
PULL_PART, PUSH_PART = "/v1/fleet/pull-object", "/v1/fleet/push-object"
"""Where the parts of a message go: Flower moves each array by a request of its own."""
CONFIRM = "/v1/fleet/confirm-message-received"
"""Where a node says that it has all parts of a message, which ends their life in the SuperLink."""

PullMessagesRequest = fleet_pb2.PullMessagesRequest
"""Says which node was given messages."""
PullMessagesResponse = fleet_pb2.PullMessagesResponse
"""Says which messages a node was given, and whether there were any."""
PushMessagesRequest = fleet_pb2.PushMessagesRequest
"""Says whose message a node pushes, for whom, in reply to what, and of which parts."""
PullObjectRequest = message_pb2.PullObjectRequest
"""Says which node receives a part."""
PushObjectRequest = message_pb2.PushObjectRequest
"""Says which part a node pushes, and how large it is."""
ConfirmMessageReceivedRequest = message_pb2.ConfirmMessageReceivedRequest
"""Says which message a node confirms: only its own must end."""
ObjectTree = message_pb2.ObjectTree
"""Lists the parts of a message."""
