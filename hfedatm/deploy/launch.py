"""Run one of Flower's commands with our additions: ``python -m hfedatm.deploy.launch COMMAND …``.

The additions are those of `hfedatm.deploy.serving`.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from hfedatm.deploy import serving


def main() -> None:
    """Run the command that the first argument names."""
    _, name, *arguments = sys.argv
    run = next(iter(entry_points(group="console_scripts", name=name))).load()
    sys.argv = [name, *arguments]
    serving.prepare()
    sys.exit(run())


if __name__ == "__main__":
    main()
