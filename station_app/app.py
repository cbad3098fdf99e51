"""A deployed station's two faces: ``client`` towards the server, ``server`` towards its clients."""

from __future__ import annotations

from functools import partial

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from hfedatm.base import logs
from hfedatm.base.answering import answering
from hfedatm.base.handover.parcel import by_parcel
from hfedatm.base.noting import noted
from hfedatm.base.trust.introduction import introduction
from hfedatm.base.trust.obeying import obey
from hfedatm.base.trust.origin import known_origin
from hfedatm.deploy import bridge

# The spool stores the answers to a station's jobs.
client = ClientApp(mods=[partial(known_origin, keep=False), by_parcel, noted, obey])
server = ServerApp()


@client.query()
@answering
def identify(message: Message, context: Context) -> RecordDict:
    """Say that this node is a station, and which one."""
    return introduction(message, context, "station")


@client.train()
@client.train("prepare")
@client.train("refine")
@client.train("look")
@client.train("count")
@client.evaluate()
@answering
def hand_over(message: Message, context: Context) -> RecordDict:
    """Hand the server's task to the station run and return its answer."""
    return bridge.answer(message, context)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Do the jobs that arrive in the spool, with the clients that are connected."""
    from pathlib import Path

    from hfedatm.base.handover import service
    from hfedatm.base.handover.spool import Spool
    from hfedatm.base.trust.policy import idle_seconds

    logs.configure()
    work = _Work(grid)
    spool = Spool(Path(str(context.run_config["spool"])))
    patience = idle_seconds()
    service.serve(spool, lambda job: service.do(job, work), wanted=lambda idle: idle < patience)


class _Work:
    """A station's work on a job: its clients do the job."""

    def __init__(self, grid: Grid) -> None:
        # Only a station's run imports what its jobs need, and it does so before the first job.
        from hfedatm.runtime.roster import LiveGrid, Roster
        from station_app.station import run_station

        self._run_station = run_station
        self._roster = Roster(grid)
        self._clients = LiveGrid(grid, self._roster)
        self._complete = False

    def __call__(self, content: RecordDict) -> RecordDict:
        from hfedatm.base.records import Task
        from hfedatm.base.tiers import children, require_tier

        task = Task.from_record(content["task"])
        logs.about(task.run)
        if not self._complete:  # nodes start together: the first job may precede the last client
            settings = task.settings
            number = children(settings, task.level)
            nodes = self._roster.wait_for(number, settings.join_timeout)
            require_tier(settings, task.level, {node.tier for node in nodes})
            self._complete = True
        self._clients.begin_job()
        return self._run_station(self._clients, content)
