"""A network with BatchNorm whose second look waits on the nodes that a test names.

A test puts a file ``pause-<machine>`` into ``$FAULTS``; the machine's look waits until it is gone.
"""

import os
import time
from pathlib import Path

from faulty import machine

from hfedatm_core.models import lenet5


def build(spec):
    model = lenet5.build(spec, batch_norm=True)
    norms = [m for m in model.modules() if type(m).__name__.startswith("BatchNorm")]
    norms[0].register_forward_pre_hook(_pause)
    return model


def _pause(norm, inputs):
    if norm.track_running_stats:  # only the first pass of a second look goes without
        return
    faults = Path(os.environ.get("FAULTS", "/nowhere"))
    if (faults / f"pause-{machine()}").exists():
        (faults / f"paused-{machine()}").write_text(str(os.getpid()))
        while (faults / f"pause-{machine()}").exists():
            time.sleep(0.1)
