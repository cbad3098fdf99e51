"""A SuperLink that is silent for a while, and a tier whose children have all gone."""

import time

import httpx
import pytest
from fake_link import FakeLink, said, to

from hfedatm.runtime.patience import SilentLink, patiently
from hfedatm.runtime.roster import LiveGrid, Roster
from server_app.flights import Flights
from server_app.pacing import PacedGrid

HANDSHAKE = httpx.ConnectTimeout("_ssl.c:989: The handshake operation timed out")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("hfedatm.runtime.patience.AGAIN", 0.001)
    monkeypatch.setattr("hfedatm.runtime.roster.LOOK_AGAIN", 0.001)


class Silent(FakeLink):
    """Raises an error for the first ``times`` requests of each kind."""

    def __init__(self, *given, times, error=HANDSHAKE, **named):
        super().__init__(*given, **named)
        self.error = error
        self.left = dict.fromkeys(("get_node_ids", "push_messages", "pull_messages"), times)

    def maybe(self, kind):
        self.left[kind] -= 1
        if self.left[kind] >= 0:
            raise self.error

    def get_node_ids(self):
        self.maybe("get_node_ids")
        return super().get_node_ids()

    def push_messages(self, messages):
        self.maybe("push_messages")
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        self.maybe("pull_messages")
        return super().pull_messages(message_ids)


class TestASilentLink:
    @pytest.mark.parametrize("error", [HANDSHAKE, httpx.ReadTimeout(""), httpx.ConnectError("x")])
    def test_every_request_is_made_again_until_the_link_answers(self, error):
        link = Silent([70, 80], times=3, error=error)
        grid = live(link, patience=60)
        assert grid.get_node_ids() == [0, 1]  # who they are is asked, too
        link.left = dict.fromkeys(link.left, 3)
        assert grid.get_node_ids() == [0, 1]
        assert [said(r) for r in grid.send_and_receive(to(0, 1))] == [
            "70 got for 0",
            "80 got for 1",
        ]
        assert all(left < 0 for left in link.left.values())

    def test_it_is_given_up_in_words_that_a_person_understands(self):
        link = Silent([70], times=0)
        grid = live(link, patience=0.02)
        grid.get_node_ids()
        link.left = dict.fromkeys(link.left, 10**6)
        with pytest.raises(SilentLink, match="its SuperLink has not answered for 0.02 s: _ssl"):
            list(grid.send_and_receive(to(0)))

    def test_an_answer_that_refuses_is_no_silence(self):
        def refuse():
            asked.append(1)
            raise httpx.HTTPStatusError("403", request=None, response=None)

        asked = []
        with pytest.raises(httpx.HTTPStatusError):
            patiently(refuse, 60)
        assert len(asked) == 1

    def test_an_error_without_words_is_named_by_its_kind(self):
        def ask():
            raise httpx.ReadTimeout("")

        with pytest.raises(SilentLink, match="ReadTimeout"):
            patiently(ask, 0.0)


class Leaving(FakeLink):
    """All nodes leave when a task is sent, and some come back after a few looks."""

    def __init__(self, *given, back=(), looks=5, **named):
        super().__init__(*given, **named)
        self.back, self.looks = list(back), looks

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        if messages[0].metadata.message_type == "train":
            self.nodes = []
        return ids

    def get_node_ids(self):
        if not self.nodes:
            self.looks -= 1
            self.nodes = self.back if self.looks == 0 else []
        return self.nodes


class TestChildrenThatHaveAllGone:
    """Node -5 is answered for with Flower's error of a node that is away."""

    def test_the_server_waits_until_one_is_back(self):
        link = Leaving([-5], back=[-5])
        grid = live(link, patience=60, awaits_return=True)
        grid.get_node_ids()
        [reply] = grid.send_and_receive(to(0))
        assert reply.error.reason.startswith("it is cut off")
        assert link.looks == 0

    def test_but_no_longer_than_it_would_wait_for_nodes_to_join(self):
        link = Leaving([-5], looks=10**9)
        grid = live(link, patience=0.05, awaits_return=True)
        grid.get_node_ids()
        began = time.monotonic()
        list(grid.send_and_receive(to(0)))
        assert time.monotonic() - began >= 0.05

    @pytest.mark.parametrize(
        ("nodes", "awaits_return"), [([-5, 70], True), ([-5], False)], ids=["one left", "station"]
    )
    def test_otherwise_nobody_waits(self, nodes, awaits_return):
        link = Leaving(nodes, looks=10**9)
        grid = live(link, patience=60, awaits_return=awaits_return)
        places = grid.get_node_ids()
        before = link.looks
        list(grid.send_and_receive(to(*places)))
        assert link.looks == before

    def test_the_same_if_a_merge_does_not_wait_for_all(self):
        link = Leaving([-5], back=[-5])
        flights = Flights(most_late=5)
        grid = PacedGrid(live(link, patience=60, awaits_return=True), flights, buffer=1)
        grid.get_node_ids()
        flights.begin_round(1)
        flights.waiting = True
        [reply] = grid.send_and_receive(to(0))
        assert reply.error.reason.startswith("it is cut off")
        assert link.looks == 0


def live(link, *, patience, awaits_return=False):
    roster = Roster(link, poll=0.001)
    roster.patience = patience
    return LiveGrid(link, roster, poll=0.001, awaits_return=awaits_return)
