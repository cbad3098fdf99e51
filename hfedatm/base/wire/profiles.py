"""Read class profiles: expected groups, shapes and types, plausible counts."""

from __future__ import annotations

from dataclasses import replace

import torch
from flwr.app import RecordDict

from hfedatm.base.class_profiles import COUNTS, tensors_to_profiles
from hfedatm.base.records import BadReply
from hfedatm.base.wire.arrays import read_state
from hfedatm.base.wire.expected import Expected
from hfedatm_core.profiles import Profiles


def read_profiles(content: RecordDict, expected: Expected, examples: int) -> Profiles:
    """Return the profiles of a reply about ``examples`` examples."""
    assert expected.profiles is not None
    wanted = replace(expected, arrays=expected.profiles.template(), record="profiles")
    tensors = read_state(content, wanted)
    counts = tensors[COUNTS]
    if bool((counts < 0).any()):
        raise BadReply("profiles: a number of examples is negative")
    if float(counts.sum()) > examples * (1 + 1e-9):
        raise BadReply(f"profiles: more examples than the {examples} that the reply claims")
    found = tensors_to_profiles(tensors)
    absent = counts == 0
    if any(bool(torch.any(mean[:, absent] != 0)) for mean in found.means.values()):
        raise BadReply("profiles: a class without examples has activations")
    return found
