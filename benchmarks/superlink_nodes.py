"""Play many nodes in one process, for `superlink_load.py`: ask, fetch, reply as SuperNodes do."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import sys
import time
from base64 import b64encode
from dataclasses import asdict, dataclass

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2, node_pb2
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
)
from flwr.supercore.task_identity import TaskIdentity

POLL = 3.0
"""Seconds that a SuperNode sleeps when there is no work."""
HEARTBEAT = 30.0


@dataclass
class Counts:
    """What all nodes together have done."""

    requests: int = 0
    failed: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    answered: int = 0
    joined: int = 0
    last_failure: str = ""


Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


def signed(keys: Keys) -> dict[str, str]:
    """Return the headers with which a SuperNode proves who it is."""
    now = datetime.datetime.now(datetime.UTC).isoformat()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(keys[1])).decode(),
        TIMESTAMP_HEADER: now,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(keys[0], now.encode())).decode(),
    }


class Link:
    """The Fleet API of a SuperLink."""

    def __init__(self, address: int, nodes: int, counts: Counts) -> None:
        limits = httpx.Limits(max_connections=nodes * 2, max_keepalive_connections=nodes * 2)
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{address}", timeout=120, limits=limits, trust_env=False
        )
        self._counts = counts

    async def ask(self, what: str, request: object, answer: type, keys: Keys) -> object:
        """Make one signed request; try again for as long as the link does not answer."""
        body = request.SerializeToString()  # type: ignore[attr-defined]
        while True:
            self._counts.requests += 1
            try:
                response = await self._client.post(
                    f"/v1/fleet/{what}",
                    content=body,
                    headers={"content-type": "application/protobuf", **signed(keys)},
                )
                response.raise_for_status()
                self._counts.bytes_up += len(body)
                self._counts.bytes_down += len(response.content)
                return answer.FromString(response.content)  # type: ignore[attr-defined]
            except httpx.HTTPError as error:
                self._counts.failed += 1
                self._counts.last_failure = f"{what}: {error!r}"[:200]
                await asyncio.sleep(POLL)


async def play(number: int, link: Link, counts: Counts) -> None:
    """Be one node until this process ends."""
    keys = generate_key_pairs()
    key = public_key_to_bytes(keys[1])
    await link.ask(
        "register-node",
        fleet_pb2.RegisterNodeFleetRequest(public_key=key),
        fleet_pb2.RegisterNodeFleetResponse,
        keys,
    )
    active = await link.ask(
        "activate-node",
        fleet_pb2.ActivateNodeRequest(public_key=key, heartbeat_interval=HEARTBEAT),
        fleet_pb2.ActivateNodeResponse,
        keys,
    )
    node = node_pb2.Node(node_id=active.node_id)  # type: ignore[attr-defined]
    counts.joined += 1
    beat = time.monotonic() + HEARTBEAT * (number % 100) / 100
    while True:
        if time.monotonic() > beat:
            beat = time.monotonic() + HEARTBEAT
            request = heartbeat_pb2.SendNodeHeartbeatRequest(
                node=node, heartbeat_interval=HEARTBEAT
            )
            await link.ask(
                "send-node-heartbeat", request, heartbeat_pb2.SendNodeHeartbeatResponse, keys
            )
        pulled = await link.ask(
            "pull-messages",
            fleet_pb2.PullMessagesRequest(node=node),
            fleet_pb2.PullMessagesResponse,
            keys,
        )
        if pulled.messages_list:  # type: ignore[attr-defined]
            await answer(pulled, node, link, keys)
            counts.answered += 1
        else:
            await asyncio.sleep(POLL)


async def answer(pulled: object, node: node_pb2.Node, link: Link, keys: Keys) -> None:
    """Fetch a message's parts and reply with as many bytes of this node's own."""
    message = message_from_proto(pulled.messages_list[0])  # type: ignore[attr-defined]
    run, size = message.metadata.run_id, 0
    for part in iterate_object_tree(pulled.message_object_trees[0]):  # type: ignore[attr-defined]
        got = await link.ask(
            "pull-object",
            message_pb2.PullObjectRequest(node=node, run_id=run, object_id=part.object_id),
            message_pb2.PullObjectResponse,
            keys,
        )
        size = max(size, len(got.object_content))  # type: ignore[attr-defined]
    confirm = message_pb2.ConfirmMessageReceivedRequest(
        node=node, run_id=run, message_object_id=message.metadata.message_id
    )
    await link.ask(
        "confirm-message-received", confirm, message_pb2.ConfirmMessageReceivedResponse, keys
    )
    TaskIdentity.node_id, TaskIdentity.run_id, TaskIdentity.task_id = node.node_id, run, 1
    array = Array("uint8", (size,), "load", os.urandom(size))
    reply = Message(RecordDict({"load": ArrayRecord({"load": array})}), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    contents = {i: thing.deflate() for i, thing in get_all_nested_objects(reply).items()}
    tree = get_object_tree(reply)
    bare = message_to_proto(remove_content_from_message(reply))
    pushed = await link.ask(
        "push-messages",
        fleet_pb2.PushMessagesRequest(
            node=node, messages_list=[bare], message_object_trees=[tree], clientapp_runtime_list=[0]
        ),
        fleet_pb2.PushMessagesResponse,
        keys,
    )
    for object_id in pushed.objects_to_push:  # type: ignore[attr-defined]
        request = message_pb2.PushObjectRequest(
            node=node,
            run_id=run,
            object_id=object_id,
            object_content=contents[object_id],
            session_id=pushed.session_id,  # type: ignore[attr-defined]
        )
        await link.ask("push-object", request, message_pb2.PushObjectResponse, keys)


async def main() -> None:
    """Play the nodes that the command line describes until this process is told to end."""
    told = json.loads(sys.argv[1])
    counts = Counts()
    link = Link(told["address"], told["nodes"], counts)
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    tasks = [asyncio.create_task(play(n, link, counts)) for n in range(told["nodes"])]
    for task in tasks:
        task.add_done_callback(lambda done: done.cancelled() or done.exception() and over.set())
    try:
        await asyncio.wait_for(over.wait(), told["seconds"] + 120)
    except TimeoutError:
        pass
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception():
            raise task.exception() or RuntimeError
        task.cancel()
    print(json.dumps(asdict(counts)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
