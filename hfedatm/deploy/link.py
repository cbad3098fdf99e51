"""A SuperLink in one process: Flower's own, and a thread that starts a command for every run.

It takes the options of ``flower-superlink``, with the additions of `hfedatm.deploy.serving`, and
hands a message out again if its node has lost it. With ``--isolation process`` a SuperExec
elsewhere starts the runs.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import entry_points

from hfedatm.deploy import serving, tasks
from hfedatm.flower_internals import hand_out_until_answered

COMMAND = "flower-superlink"


def main() -> None:
    """Run a SuperLink: ``python -m hfedatm.deploy.link --help``."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--ssl-ca-certfile")
    options.add_argument("--isolation")
    given, _ = options.parse_known_args()
    sys.argv = [COMMAND, *sys.argv[1:]]
    run = next(iter(entry_points(group="console_scripts", name=COMMAND))).load()
    serving.prepare()
    hand_out_until_answered()
    if given.port and not given.isolation:
        tasks.begin(given.port, given.ssl_ca_certfile)
        sys.argv += ["--isolation", "process"]
    sys.exit(run())


if __name__ == "__main__":
    main()
