"""A deployed station's two faces: ``client`` towards the server, ``server`` towards its clients."""

from __future__ import annotations

from functools import partial

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from hfedatm.base.answering import answering
from hfedatm.base.handover.parcel import by_parcel
from hfedatm.base.trust.introduction import introduction
from hfedatm.base.trust.obeying import obey
from hfedatm.base.trust.origin import known_origin
from hfedatm.deploy import bridge

# The spool keeps the answers to a station's jobs.
client = ClientApp(mods=[partial(known_origin, keep=False), by_parcel, obey])
server = ServerApp()


@client.query()
@answering
def identify(message: Message, context: Context) -> RecordDict:
    """Say that this node is a station, and which one."""
    return introduction(message, context, "station")


@client.train()
@client.train("prepare")
@client.evaluate()
@answering
def hand_over(message: Message, context: Context) -> RecordDict:
    """Have the station run do what the server asks for."""
    return bridge.answer(message, context)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Do the jobs that come through the spool, with whichever clients are connected."""
    from pathlib import Path

    from hfedatm.base.handover import service
    from hfedatm.base.handover.spool import Spool
    from hfedatm.base.records import Task
    from hfedatm.runtime.roster import LiveGrid, Roster
    from station_app.station import run_station  # late: the other face is to start quickly

    roster = Roster(grid)
    clients = LiveGrid(grid, roster)
    waited = False

    def work(content: RecordDict) -> RecordDict:
        nonlocal waited
        if not waited:  # all start at once: the first job may come before the last client
            settings = Task.from_record(content["task"]).settings
            roster.wait_for(settings.clients_per_station, settings.join_timeout)
            waited = True
        clients.begin_job()
        return run_station(clients, content)

    spool = Spool(Path(str(context.run_config["spool"])))
    service.serve(spool, lambda job: service.do(job, work))
