"""Class profiles in a federation: which groups have one, their wire form, and their bounds.

A profile is the mean activation of a channel per class (:mod:`hfedatm_core.profiles`). Clients
send profiles with the Grams of a merge of stations that did not share a start, if the rule asks
for them. They are exact class means, so an owner must allow them (``privacy.class-profiles``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import Tensor

from hfedatm.base.records import BadTask, state_to_record
from hfedatm_core.profiles import Profiles
from hfedatm_core.update import Update

COUNTS = "counts"
"""Name of the tensor with the number of examples of each class."""
_GROUP = "group/"


@dataclass(frozen=True)
class ProfileShapes:
    """The groups that have a profile, with their channels and places, and the classes."""

    groups: Mapping[str, tuple[int, int]]
    classes: int

    @classmethod
    def of(cls, profiles: Profiles) -> ProfileShapes:
        """Return the shapes of these profiles."""
        groups = {n: (m.shape[0], m.shape[2]) for n, m in profiles.means.items()}
        return cls(groups, len(profiles.counts))

    def template(self) -> dict[str, Tensor]:
        """Return tensors of the names, shapes and types that a reply has; they take no memory."""
        means = {
            f"{_GROUP}{name}": torch.zeros(1).expand(channels, self.classes, places)
            for name, (channels, places) in self.groups.items()
        }
        return {COUNTS: torch.zeros(self.classes, dtype=torch.float64), **means}

    def to_record(self) -> ConfigRecord:
        """Return the wire form, in which the server tells the stations what to expect."""
        sizes = list(self.groups.values())
        return ConfigRecord(
            {
                "groups": list(self.groups),
                "channels": [channels for channels, _ in sizes],
                "places": [places for _, places in sizes],
                "classes": self.classes,
            }
        )

    @classmethod
    def from_record(cls, record: ConfigRecord) -> ProfileShapes:
        """Read the wire form; raises `BadTask` for anything else."""
        columns = [record.get(key) for key in ("groups", "channels", "places")]
        classes = record.get("classes")
        if type(classes) is not int or not 1 <= classes < 2**20:
            raise BadTask("profiles: the number of classes is not plausible")
        if not all(isinstance(column, list) for column in columns):
            raise BadTask("profiles: 'groups', 'channels' and 'places' must be lists")
        names, channels, places = columns
        if len({len(names), len(channels), len(places), len(set(names))}) != 1:  # type: ignore[arg-type]
            raise BadTask("profiles: every group needs a name of its own, channels and places")
        rows = list(zip(names, channels, places, strict=True))  # type: ignore[arg-type]
        if not all(
            type(n) is str and type(c) is int and type(p) is int and 1 <= c < 2**24 and 0 < p < 2**8
            for n, c, p in rows
        ):
            raise BadTask("profiles: a group's name, channels or places are not plausible")
        return cls({n: (c, p) for n, c, p in rows}, classes)  # type: ignore[misc]


def profiles_to_record(profiles: Profiles) -> ArrayRecord:
    """Wrap profiles."""
    means = {f"{_GROUP}{name}": mean.float() for name, mean in profiles.means.items()}
    return state_to_record({COUNTS: profiles.counts.double(), **means})


def tensors_to_profiles(tensors: Mapping[str, Tensor]) -> Profiles:
    """Unwrap tensors that have the names and shapes of a template."""
    means = {n.removeprefix(_GROUP): m for n, m in tensors.items() if n != COUNTS}
    return Profiles(means, tensors[COUNTS])


class ProfileBounds:
    """Limits on the profiles of one node, by those of all nodes of its tier.

    The length of a group's profile counts up to ``bound_factor`` times the usual length, the number
    of examples up to ``claim_factor`` times the usual number; a factor of 0 is no bound.
    """

    def __init__(self, bound_factor: float, claim_factor: float) -> None:
        self._factors = (bound_factor, claim_factor)
        self._sizes: dict[str, dict[str, float]] = {}

    def note(self, name: str, profiles: Profiles | None) -> None:
        """Note the size of a node's profiles; all are noted before the first is cut."""
        if profiles is not None:
            self._sizes[name] = _sizes(profiles)

    def cut(self, update: Update) -> Profiles | None:
        """Return the profiles of an update within the bounds."""
        found = update.profiles
        if found is None:
            return None
        means = {g: m * self._share(f"{_GROUP}{g}", update.name) for g, m in found.means.items()}
        share = self._share(COUNTS, update.name, update.num_examples)
        return Profiles(means, found.counts * share)

    def _share(self, what: str, name: str, limit: float = math.inf) -> float:
        factor, own = self._factors[what == COUNTS], self._sizes[name][what]
        found = [sizes[what] for sizes in self._sizes.values() if sizes[what] > 0]
        if factor and len(found) > 1:
            middle = min if len(found) == 2 else statistics.median
            limit = min(limit, factor * middle(found))
        return limit / own if own > limit else 1.0


def _sizes(profiles: Profiles) -> dict[str, float]:
    lengths = {f"{_GROUP}{n}": float(m.double().norm()) for n, m in profiles.means.items()}
    return {COUNTS: float(profiles.counts.sum()), **lengths}
