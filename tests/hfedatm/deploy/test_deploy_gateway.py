import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from starlette.testclient import TestClient

from hfedatm.deploy import gateway
from hfedatm.deploy.gateway import build


class Upstream(BaseHTTPRequestHandler):
    """Answers with what it was asked, and keeps it for the test."""

    seen: list = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append((self.path, dict(self.headers), body))
        self.send_response(401 if b"unknown" in body else 200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def upstream():
    Upstream.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def node(upstream):
    with TestClient(build(upstream, max_body=1000)) as client:
        yield client


def test_fleet_calls_pass_with_their_signature(node):
    signed = {"flwr-public-key": "a2V5", "flwr-signature": "c2ln", "content-type": "application/x"}
    answer = node.post("/v1/fleet/pull-messages", content=b"\x00\xff", headers=signed)
    assert (answer.status_code, answer.content) == (200, b"\x00\xff")
    assert answer.headers["content-type"] == "application/x-protobuf"
    path, headers, _ = Upstream.seen[0]
    assert path == "/v1/fleet/pull-messages"
    assert signed.items() <= {key.lower(): value for key, value in headers.items()}.items()


def test_the_links_refusal_passes(node):
    assert node.post("/v1/fleet/activate-node", content=b"unknown").status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/pull-task-input",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/..%2fcontrol%2fstart-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "//v1/control/start-run",
        "/V1/FLEET/pull-messages",
        "/v1/fleet/",
        "/openapi.json",
        "/docs",
        "/",
    ],
)
def test_everything_else_is_refused_before_it_reaches_the_link(node, path):
    for method in ("GET", "POST"):
        assert node.request(method, path, content=b"").status_code == 403
    assert Upstream.seen == []


def test_a_body_over_the_limit_is_refused(node):
    assert node.post("/v1/fleet/push-object", content=b"x" * 1001).status_code == 413
    assert node.post("/v1/fleet/push-object", content=b"x" * 1000).status_code == 200
    assert len(Upstream.seen) == 1


def test_a_link_that_is_away_is_a_reason_to_try_again():
    with TestClient(build("http://127.0.0.1:9")) as client:
        assert client.post("/v1/fleet/pull-messages", content=b"").status_code == 502


def test_a_request_for_work_is_kept_until_there_is_some(monkeypatch):
    from flwr.proto.fleet_pb2 import PullMessagesResponse
    from flwr.proto.message_pb2 import Message

    some = PullMessagesResponse(messages_list=[Message()]).SerializeToString()
    answers = [b"", b"", some]

    async def answer(self, method, path, **_):
        return httpx.Response(200, content=answers.pop(0))

    monkeypatch.setattr(httpx.AsyncClient, "request", answer)
    monkeypatch.setattr(gateway, "LOOK_AGAIN", 0.01)
    with TestClient(gateway.build("http://link")) as node:
        assert node.post("/v1/fleet/pull-messages", content=b"").content == some
    assert not answers


def test_a_request_for_work_is_not_kept_for_ever(monkeypatch):
    async def nothing(self, method, path, **_):
        return httpx.Response(200, content=b"")

    monkeypatch.setattr(httpx.AsyncClient, "request", nothing)
    monkeypatch.setattr(gateway, "KEPT", 0.1)
    with TestClient(gateway.build("http://link")) as node:
        assert node.post("/v1/fleet/pull-messages", content=b"").content == b""


def test_few_nodes_are_asked_for_at_once_and_many_do_not_fill_the_link():
    """Asking takes at most a quarter of the link's time, whatever the number of nodes."""
    seconds = 0.004
    for nodes in (1, 10, 100, 600):
        pace = gateway.Pace()
        with ExitStack() as waiting:
            for _ in range(nodes):
                waiting.enter_context(pace.waiting(True))
            for _ in range(50):
                pace.took(seconds)
            assert pace.pause(0.0) >= 0.1
            if nodes <= 10:
                assert pace.pause(0.0) <= 0.2 and pace.pause(100.0) == gateway.LOOK_AGAIN
            assert nodes * seconds / pace.pause(100.0) <= gateway.SHARE + 1e-9
    assert pace.pause(0.0) == 0.1  # nobody waits any more


def test_a_slow_link_is_never_asked_less_often_than_a_request_is_kept():
    pace = gateway.Pace()
    with pace.waiting(True):
        pace.took(60.0)
        assert pace.pause(0.0) == gateway.KEPT
