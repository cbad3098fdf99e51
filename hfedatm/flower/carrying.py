"""Carry Grams in the messages of another app.

Flower's strategies and mods want exactly one ArrayRecord in a reply and ignore ConfigRecords. Grams
therefore travel in a ConfigRecord, which works with any other mods in any order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hfedatm.base.records import find_record
from hfedatm_core import Gram, pack_grams, unpack_grams
from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.grams.definite import is_semidefinite
from hfedatm_core.grams.encoding import WireType

_LOG = logging.getLogger("flwr")
KEY = "hfedatm.grams"
_ROUNDING = 2.0**-7
"""Largest relative error of an entry: Grams may be sent in bfloat16, and pass through a station."""
UNWANTED = "hfedatm.grams-unwanted"
"""Set in the config of a message whose reply needs no Grams."""


@dataclass(frozen=True)
class Carried:
    """The Grams of a reply, and how many clients they are the mean of."""

    grams: Mapping[str, Gram]
    clients: int = 1


def put_grams(content: RecordDict, carried: Carried, dtype: WireType = "float16") -> None:
    """Add Grams to a reply."""
    packed = save(pack_grams(carried.grams, dtype=dtype))
    content[KEY] = ConfigRecord({"grams": packed, "clients": carried.clients})


def take_grams(message: Message) -> Carried:
    """Take the Grams out of a reply; if they cannot be read, return none and log the reason."""
    if message.has_error():
        return Carried({})
    record = find_record(message.content, KEY, ConfigRecord)
    if record is None:
        return Carried({})
    del message.content[KEY]
    try:
        return _read(record)
    except ValueError as error:
        sender = message.metadata.src_node_id
        _LOG.warning("hfedatm: the Grams of node %d are left out: %s", sender, error)
        return Carried({})


def _read(record: ConfigRecord) -> Carried:
    packed, clients = record.get("grams"), record.get("clients")
    if not isinstance(packed, bytes) or type(clients) is not int or not 1 <= clients < 2**31:
        raise ValueError("they are not of the form that hfedatm.flower sends")
    try:
        grams = unpack_grams(load(packed))
    except SafetensorError as error:
        raise ValueError(f"they cannot be read: {error}") from None
    for names, gram in distinct(grams).items():
        if bool((gram.diagonal() < 0).any()) or not is_semidefinite(gram, _ROUNDING):
            raise ValueError(f"that of '{names[0]}' is not positive semi-definite")
    return Carried(grams, clients)


def grams_wanted(content: RecordDict) -> bool:
    """Return whether the sender of this message wants Grams."""
    return not any(record.get(UNWANTED) for record in content.config_records.values())
