"""A client's warm process: it has imported torch once and forks for every message.

Flower starts a new process per message, and importing torch takes longer than many a local round.
Where a deployed node's configuration names a ``spool``, that process stays light: it hands the
message over to one that lives as long as the node and does each job in a fork of itself. What one
message leaves behind in memory, or dies of, so concerns no other.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from hfedatm.handling import reply_with_failure
from hfedatm.handover import service
from hfedatm.handover.spool import HandoverError, Job, Spool


class WarmProcess:
    """The process that serves a client's spool."""

    what = "training process"

    def __init__(self, spool: Spool) -> None:
        self.spool = spool

    def start(self) -> None:
        """Start it; it ends when the node's own process, which started this one, is gone."""
        command = [sys.executable, "-m", "client_app.warm", str(self.spool.folder)]
        self._process = subprocess.Popen(
            [*command, str(os.getppid())], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def ended(self) -> str:
        """Return why it is over, or an empty string while it is not."""
        code = self._process.poll()
        return "" if code is None else f"it ended with code {code}"


def warm(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Hand work over where the node has a warm process (a Flower mod)."""
    config = dict(context.node_config)
    folder = config.pop("spool", "")
    metadata = message.metadata
    if not folder or metadata.message_type == MessageType.QUERY:
        return call_next(message, context)
    asked = {"kind": metadata.message_type, "run": context.run_id, "node": context.node_id}
    envelope = ConfigRecord({**asked, "config": json.dumps(config)})
    try:
        answer = service.hand_over(
            RecordDict({**message.content, "envelope": envelope}),
            metadata.run_id,
            metadata.message_id,
            WarmProcess(Spool(Path(str(folder)))),
            timeout=metadata.created_at + metadata.ttl - time.time(),
        )
    except HandoverError as error:
        return reply_with_failure(message, error)
    return Message(answer, reply_to=message)


def open_envelope(content: RecordDict) -> RecordDict:
    """Do what a handed-over message asks for."""
    from flwr.supercore.task_identity import TaskIdentity

    from client_app.app import app

    envelope = dict(content.pop("envelope"))
    run, node = int(envelope["run"]), int(envelope["node"])
    # Flower tells a process who it is before it may make a message; here that is us.
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run, node
    context = Context(run, node, json.loads(envelope["config"]), RecordDict(), {})
    return app(Message(content, node, str(envelope["kind"])), context).content


def do_in_fork(
    job: Job,
    work: service.Work,
    wanted: Callable[[], bool] = lambda: True,
    poll: float = 0.05,
) -> None:
    """Do one job in a fork of this process; one that nobody wants any more is stopped."""
    if not (child := os.fork()):
        service.do(job, work)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        withdrawn = not job.request.exists() and not job.done
        if withdrawn or not wanted():
            os.kill(child, signal.SIGKILL)
        time.sleep(poll)
    if not job.done and job.request.exists() and wanted():
        code = os.waitstatus_to_exitcode(ended[1])
        why = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        job.fail(f"the training process {why}; 9 is also what a lack of memory looks like")


def main(folder: str, node: str) -> None:
    """Serve a spool until the process with the id ``node`` is gone."""
    import psutil

    import client_app.secure
    import client_app.work  # noqa: F401  everything that is slow to import

    above = psutil.Process(int(node))

    def wanted(idle: float = 0.0) -> bool:
        return above.is_running() and above.status() != psutil.STATUS_ZOMBIE

    gc.freeze()  # what is there already is not to be copied into every fork
    service.serve(
        Spool(Path(folder)), lambda job: do_in_fork(job, open_envelope, wanted), wanted=wanted
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
