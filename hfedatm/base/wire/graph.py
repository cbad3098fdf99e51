"""Channel graphs in messages: a station that aligns stations holds no data to trace a model with.

Only the groups travel, which say what a permutation moves. The receiver checks every axis and
position against the model in the same message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from flwr.app import ConfigRecord

from hfedatm.base.records import BadTask
from hfedatm.base.text import printable
from hfedatm_core import ChannelGraph
from hfedatm_core.channels.groups import ChannelGroup, Kind, Member, Role
from hfedatm_core.tensors import State

MOST_TEXT = 16_000_000
"""Most characters of a graph."""


def graph_to_record(graph: ChannelGraph) -> ConfigRecord:
    """Return the wire form of a graph's groups and kernels."""
    groups = [
        [g.name, g.size, g.kind, [[*vars(member).values()] for member in g.members]]
        for g in graph.groups
    ]
    return ConfigRecord({"graph": json.dumps({"groups": groups, "kernels": sorted(graph.kernels)})})


def record_to_graph(record: ConfigRecord, model: State) -> ChannelGraph:
    """Read a graph of ``model``; raises `BadTask` unless all its positions are in the model."""
    text = record.get("graph")
    if not isinstance(text, str) or len(text) > MOST_TEXT:
        raise BadTask("graph: it is not text, or too long")
    try:
        said = json.loads(text)
        groups = tuple(_group(one, model) for one in said["groups"])
        kernels = said["kernels"]
    except BadTask:
        raise
    except Exception as error:  # the text may hold anything
        raise BadTask(printable(f"graph: it cannot be read: {error}")) from None
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise BadTask("graph: two of its groups have one name")
    if not (isinstance(kernels, list) and all(type(k) is str and k in model for k in kernels)):
        raise BadTask("graph: its kernels are not tensors of the model")
    return ChannelGraph(groups, kernels=frozenset(kernels))


def _group(said: Any, model: State) -> ChannelGroup:
    name, size, kind, members = said
    if type(name) is not str or kind not in get_args(Kind):
        raise BadTask("graph: a group has no name, or an unknown kind")
    if type(size) is not int or not 1 <= size < 2**31:
        raise BadTask(f"graph: a group of {printable(size, 40)} channels is not plausible")
    return ChannelGroup(name, size, kind, tuple(_member(one, size, model) for one in members))


def _member(said: Any, size: int, model: Mapping[str, Any]) -> Member:
    tensor, axis, offset, block, role, places = said
    if tensor not in model or role not in get_args(Role):
        raise BadTask(f"graph: {printable(tensor, 60)} is no tensor of the model")
    numbers = (axis, offset, block, *(places or ()))
    if not all(type(n) is int and 0 <= n < 2**31 for n in numbers) or block < 1:
        raise BadTask(f"graph: {tensor} has positions that are no numbers")
    shape = tuple(model[tensor].shape)
    length = shape[axis] if axis < len(shape) else 0
    if places is None:
        fits = offset + size * block <= length
    else:
        fits = len(places) == size * block == len(set(places)) and max(places) < length
    if not fits:
        raise BadTask(f"graph: axis {axis} of {tensor} has no room for {size} channels")
    return Member(tensor, axis, offset, block, role, None if places is None else tuple(places))
