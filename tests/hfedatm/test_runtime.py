"""The Grids: order, laziness, who may be asked, who is silent, how much is in memory."""

import gc
import threading
import time
import weakref

import httpx
import pytest
from fake_link import FakeLink, said, text, to
from flwr.app import ConfigRecord, Context, Message, RecordDict
from google.protobuf.message import DecodeError
from helpers import Saboteur

from hfedatm.base.errors import UserError
from hfedatm.base.streaming import NO_REPLY, StreamingGrid
from hfedatm.base.versions import own_version
from hfedatm.runtime.in_process import InProcessGrid
from hfedatm.runtime.mapped import MappedGrid
from hfedatm.runtime.roster import LiveGrid, Roster
from hfedatm.runtime.stations import LocalStationsGrid


class Scripted(StreamingGrid):
    """Answers when asked, and notes it."""

    def __init__(self, silent=()):
        self.silent, self.asked, self.sent = set(silent), [], {}

    def get_node_ids(self):
        return [1, 2, 3]

    def push_messages(self, messages):
        self.sent = {str(i): m for i, m in enumerate(messages)}
        return list(self.sent)

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def wait_for(self, message_id, sent_at, timeout):
        message = self.sent[message_id]
        self.asked.append(message.metadata.dst_node_id)
        if message.metadata.dst_node_id in self.silent:
            return None
        return Message(text("yes"), reply_to=message)


class TestStreamingGrid:
    def test_replies_come_in_the_order_of_the_messages(self):
        replies = Scripted().send_and_receive(to(3, 1, 2))
        assert [reply.metadata.src_node_id for reply in replies] == [3, 1, 2]

    def test_nothing_is_waited_for_before_it_is_asked_for(self):
        grid = Scripted()
        replies = grid.send_and_receive(to(1, 2, 3))
        assert grid.asked == []
        next(replies)
        assert grid.asked == [1]
        next(replies)
        assert grid.asked == [1, 2]

    def test_the_silent_are_named(self):
        replies = list(Scripted(silent=[2]).send_and_receive(to(1, 2, 3), timeout=0.5))
        assert [r.metadata.src_node_id for r in replies] == [1, 2, 3]
        assert [r.has_error() for r in replies] == [False, True, False]
        assert replies[1].error.code == NO_REPLY
        assert replies[1].error.reason == "no reply within 0.5 s"

    def test_silence_without_a_time_limit_is_named_too(self):
        [reply] = Scripted(silent=[2]).send_and_receive(to(2))
        assert reply.error.reason == "could not be reached"


class TestMappedGrid:
    def test_shows_its_own_children_only(self):
        grid = MappedGrid(FakeLink([70, 80, 90]), {5: 90, 4: 80})
        assert grid.get_node_ids() == [4, 5]

    def test_refuses_a_node_of_another_station_before_anything_is_sent_to_it(self):
        link = FakeLink([70, 80, 90])
        grid = MappedGrid(link, {4: 80})
        with pytest.raises(ValueError, match="node 70 is not one of this tier's children"):
            list(grid.send_and_receive(to(70)))
        assert link.received == []

    def test_virtual_clients_share_a_node_and_keep_their_names(self):
        link = FakeLink([70])
        grid = MappedGrid(link, {1: 70, 2: 70}, poll=0.001)
        replies = list(grid.send_and_receive(to(1, 2), timeout=5))
        assert [node for node, _ in link.received] == [70, 70]
        assert [said(r) for r in replies] == ["70 got for 1", "70 got for 2"]
        assert [r.metadata.src_node_id for r in replies] == [1, 2]

    def test_the_silent_are_named_and_the_others_are_heard(self):
        grid = MappedGrid(FakeLink([70, 80], silent=[70]), {1: 70, 2: 80}, poll=0.001)
        silent, heard = grid.send_and_receive(to(1, 2), timeout=0.05)
        assert silent.metadata.src_node_id == 1
        assert silent.error.reason == "no reply within 0.05 s"
        assert said(heard) == "80 got for 2"

    def test_a_message_the_link_refuses_is_a_failure_of_that_node_alone(self):
        grid = MappedGrid(FakeLink([70, 80], refuse=[70]), {1: 70, 2: 80}, poll=0.001)
        refused, heard = grid.send_and_receive(to(1, 2), timeout=5)
        assert (refused.metadata.src_node_id, refused.error.reason) == (1, "could not be reached")
        assert said(heard) == "80 got for 2"

    def test_an_error_of_the_link_is_passed_on_under_the_logical_name(self):
        grid = MappedGrid(FakeLink([-7]), {1: -7}, poll=0.001)
        [reply] = grid.send_and_receive(to(1), timeout=5)
        assert reply.metadata.src_node_id == 1
        assert reply.error.reason == "node unavailable"
        for code, said_of_it in (
            (5, "it is cut off: its SuperLink has had no sign of life"),
            (8, "the process that did its work was killed"),
        ):
            grid = MappedGrid(FakeLink([-code]), {1: -code}, poll=0.001)
            [reply] = grid.send_and_receive(to(1), timeout=5)
            assert reply.error.reason.startswith(said_of_it)

    @pytest.mark.parametrize(
        "error", [KeyError("x"), ValueError("head"), RecursionError(), DecodeError("\x1b[2J")]
    )
    def test_a_reply_that_does_not_inflate_is_a_failure_of_that_node_alone(self, error):
        class Link(FakeLink):
            def answer(self, message):
                if message.metadata.dst_node_id == 70:
                    raise error
                return super().answer(message)

        grid = MappedGrid(Link([70, 80]), {1: 70, 2: 80}, poll=0.001)
        broken, heard = grid.send_and_receive(to(1, 2), timeout=5)
        assert broken.metadata.src_node_id == 1
        assert broken.error.reason.startswith("its reply cannot be read: ")
        assert broken.error.reason.isprintable() and len(broken.error.reason) < 250
        assert said(heard) == "80 got for 2"

    @pytest.mark.parametrize("error", [httpx.ConnectError("gone"), ConnectionResetError()])
    def test_a_link_that_is_gone_is_no_failure_of_a_node(self, error):
        class Link(FakeLink):
            def pull_messages(self, message_ids):
                raise error

        with pytest.raises(type(error)):
            list(MappedGrid(Link([70]), {1: 70}, poll=0.001).send_and_receive(to(1), timeout=5))

    def test_a_reply_is_taken_for_that_of_whoever_was_asked(self):
        """Whatever it says about which message it answers."""

        class Link(FakeLink):
            def answer(self, message):
                reply = super().answer(message)
                reply.metadata.__dict__["_reply_to_message_id"] = "another"
                return reply

        grid = MappedGrid(Link([70]), {1: 70}, poll=0.001)
        [reply] = grid.send_and_receive(to(1), timeout=5)
        assert (reply.metadata.src_node_id, said(reply)) == (1, "70 got for 1")


class TestRoster:
    @pytest.mark.parametrize(
        "place",
        [
            {},
            {"tier": "client"},
            {"tier": "boss", "index": 0, "siblings": 0},
            {"tier": "client", "index": "one", "siblings": 0},
            {"tier": "client", "index": 2**62, "siblings": 0},
            {"tier": "client", "index": 0, "siblings": [2**62]},
        ],
        ids=range(6),
    )
    def test_a_node_with_an_odd_answer_is_not_there(self, place):
        class Link(FakeLink):
            def answer(self, message):
                if message.metadata.dst_node_id == 70:
                    return Message(RecordDict({"node": ConfigRecord(place)}), reply_to=message)
                return super().answer(message)

        assert [n.node_id for n in Roster(Link([70, 80]), poll=0.001).present()] == [80]

    def test_nodes_are_in_the_order_of_their_places(self):
        assert [n.node_id for n in Roster(FakeLink([90, 70]), poll=0.001).present()] == [90, 70]

    def test_a_node_is_asked_once(self):
        link = FakeLink([90, 70])
        roster = Roster(link, poll=0.001)
        roster.present()
        roster.present()
        assert len(link.received) == 2

    def test_a_node_of_another_version_is_refused_by_name_and_taken_once_it_is_mended(
        self, monkeypatch, caplog
    ):
        class Link(FakeLink):
            version = "99.1.0"

            def answer(self, message):
                reply = super().answer(message)
                reply.content["node"]["version"] = self.version
                return reply

        link = Link([70])
        roster = Roster(link, poll=0.001)
        with pytest.raises(UserError, match="node 70: it has hfedatm 99.1.0 and this node"):
            roster.wait_for(1, timeout=0.01)
        assert roster.present() == [] and len(link.received) == 1  # not asked again at once
        monkeypatch.setattr("hfedatm.runtime.roster.ASK_AGAIN", 0.0)
        assert roster.present() == []
        assert caplog.text.count("99.1.0") == 1  # one line, however often it is asked
        link.version = own_version()  # upgraded: the same key, so the same node id
        assert [node.node_id for node in roster.present()] == [70]

    def test_nobody_there_is_said(self):
        with pytest.raises(UserError, match="no node has connected within 0.01 s"):
            Roster(FakeLink([]), poll=0.001).wait_for(2, timeout=0.01)

    def test_a_child_that_comes_back_under_a_new_id_is_found_under_its_place(self):
        link = FakeLink([70, 80], tier="station")
        grid = LiveGrid(link, Roster(link, poll=0.001), poll=0.001)
        assert grid.get_node_ids() == [0, 1]
        link.nodes[0] = 75
        assert grid.get_node_ids() == [0, 1]
        [reply] = grid.send_and_receive(to(0), timeout=5)
        assert said(reply) == "75 got for 0"


class TestInProcessGrid:
    def test_clients_run_one_at_a_time_when_their_reply_is_taken(self):
        ran = []

        def app(message, context):
            ran.append(context.node_id)
            return Message(text("done"), reply_to=message)

        replies = InProcessGrid(app, [1, 2]).send_and_receive(to(1, 2))
        assert ran == []
        next(replies)
        assert ran == [1]

    def test_a_late_client_is_named_and_does_not_hold_up_the_next(self):
        release = threading.Event()

        def app(message, context):
            if context.node_id == 1:
                release.wait()
            return Message(text("done"), reply_to=message)

        grid = InProcessGrid(app, [1, 2])
        [late] = grid.send_and_receive(to(1), timeout=0.1)
        [fine] = grid.send_and_receive(to(2), timeout=300)  # the first is still at work
        release.set()
        assert late.error.reason == "no reply within 0.1 s"
        assert said(fine) == "done"

    @pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit("bye")])
    def test_a_client_that_dies_is_an_error_reply(self, error):
        def app(message, context):
            raise error

        [reply] = InProcessGrid(app, [1]).send_and_receive(to(1), timeout=5)
        assert str(error) in reply.error.reason and type(error).__name__ in reply.error.reason

    def test_the_real_app_answers_a_query_with_its_place(self):
        saboteur = Saboteur(lambda message, reply: reply, set())
        context = Context(0, 1, {"partition-id": 3, "num-partitions": 8}, RecordDict(), {})
        reply = saboteur(to(1, kind="query")[0], context)
        place = {"tier": "client", "index": 3, "siblings": 8}
        assert dict(reply.content["node"]) == place | {"version": own_version()}


class Tracked(RecordDict):
    """A content whose instances can be counted."""

    alive: weakref.WeakSet = weakref.WeakSet()

    def __init__(self):
        super().__init__({"text": ConfigRecord({"value": "reply"})})
        Tracked.alive.add(self)

    __hash__ = object.__hash__


class TestLocalStationsGrid:
    @pytest.mark.parametrize("places", [1, 2])
    def test_no_more_replies_wait_in_memory_than_there_are_places(self, places):
        Tracked.alive = weakref.WeakSet()
        most = 0

        def run_station(grid, content):
            return Tracked()

        grid = LocalStationsGrid(run_station, dict.fromkeys(range(8)), concurrency=places)
        for reply in grid.send_and_receive(to(*range(8))):
            time.sleep(0.02)  # give the others time to run ahead, if they could
            gc.collect()
            most = max(most, len(Tracked.alive))
            del reply
        assert 1 <= most <= places + 1, "those that wait, and the one that was taken"

    def test_no_more_work_at_a_time_than_there_are_places(self):
        lock, now, most = threading.Lock(), 0, 0
        together = threading.Barrier(3)  # none is done before three are at work

        def run_station(grid, content):
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            together.wait(60)
            with lock:
                now -= 1
            return text("done")

        grid = LocalStationsGrid(run_station, dict.fromkeys(range(6)), concurrency=3)
        assert len(list(grid.send_and_receive(to(*range(6))))) == 6
        assert most == 3

    def test_each_station_gets_its_own_grid_and_replies_are_in_order(self):
        last_is_done = threading.Event()

        def run_station(grid, content):
            if grid == "grid 0":
                assert last_is_done.wait(60)
            if grid == "grid 2":
                last_is_done.set()
            return text(grid)

        grid = LocalStationsGrid(run_station, {s: f"grid {s}" for s in range(3)})
        replies = grid.send_and_receive(to(0, 1, 2))
        assert [said(r) for r in replies] == ["grid 0", "grid 1", "grid 2"]

    def test_a_station_that_raises_answers_with_its_error(self):
        def run_station(grid, content):
            raise ValueError("no power")

        [reply] = LocalStationsGrid(run_station, {4: None}).send_and_receive(to(4))
        reason = reply.content.config_records["failure"]["reason"]
        assert reason.startswith("ValueError: no power (run_station, test_runtime.py:")

    def test_replies_nobody_took_do_not_block_the_next_round(self):
        grid = LocalStationsGrid(
            lambda grid, content: text(said_in(content)), dict.fromkeys(range(3)), concurrency=1
        )
        abandoned = grid.send_and_receive(to(0, 1, 2))
        next(abandoned)
        replies = list(grid.send_and_receive(to(2, 1)))
        assert [said(r) for r in replies] == ["for 2", "for 1"]


def said_in(content):
    return content.config_records["text"]["value"]
