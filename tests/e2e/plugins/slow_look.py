"""A network with BatchNorm whose second look or exchange waits on the nodes that a test names.

A test puts a file ``pause-<machine>`` into ``$FAULTS``; the machine's look waits until it is gone.
With ``pause-refine-<machine>`` its next exchange of refining waits.
"""

import inspect
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
    faults, name = Path(os.environ.get("FAULTS", "/nowhere")), f"pause-{machine()}"
    if norm.track_running_stats:  # only the first pass of a second look goes without
        name = f"pause-refine-{machine()}"
        if not (faults / name).exists() or not _refines():
            return
    if (faults / name).exists():
        (faults / f"paused-{machine()}").write_text(str(os.getpid()))
        while (faults / name).exists():
            time.sleep(0.1)


def _refines():
    return any(frame.filename.endswith("layer_pairs.py") for frame in inspect.stack(0))
