"""Find the layers that two networks of one family have in common, and the blocks that one lacks."""

from __future__ import annotations

from dataclasses import dataclass

from hfedatm_core.resizing.architecture import Architecture


@dataclass(frozen=True)
class Layers:
    """The tensors of two networks side by side.

    Attributes
    ----------
    pairs
        Tensor of the target -> tensor of the station.
    absent
        Tensors of the target that the station does not have.
    extra
        Tensors of the station that have no place in the target.
    """

    pairs: dict[str, str]
    absent: tuple[str, ...]
    extra: tuple[str, ...]


def match_layers(target: Architecture, station: Architecture) -> Layers:
    """Pair the layers of two networks, by their names or by their places.

    Blocks of one family carry the same names if one network has all names of the other (ResNet-18
    and ResNet-34). Otherwise (VGG, whose layers are numbered throughout) the n-th layer of a kind
    in a stage of one network is the n-th of this stage in the other.
    """
    ours, theirs = set(target.shapes), set(station.shapes)
    if theirs <= ours or ours <= theirs:
        pairs = {name: name for name in target.shapes if name in theirs}
    else:
        at = {place: module for module, place in station.places.items()}
        pairs = {}
        for name in target.shapes:
            module, _, tensor = name.rpartition(".")
            other = at.get(target.places.get(module, ()))
            own = f"{other}.{tensor}" if other else tensor
            if other is not None and own in theirs:
                pairs[name] = own
    used = set(pairs.values())
    return Layers(
        pairs,
        tuple(name for name in target.shapes if name not in pairs),
        tuple(name for name in station.shapes if name not in used),
    )


def blocks(names: tuple[str, ...], everything: set[str]) -> list[str]:
    """Return the smallest set of module names that hold these tensors and no others."""
    wanted, found = set(names), []
    for name in names:
        parts = name.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            head = ".".join(parts[:depth])
            inside = {other for other in everything if other.startswith(f"{head}.")}
            if inside <= wanted:
                if head not in found:
                    found.append(head)
                break
        else:
            found.append(name)
    return found
