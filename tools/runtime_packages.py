"""Print the packages that an installed hfedatm needs at run time: the input of an SBOM.

The environment of a developer has more packages than a wheel brings along; this follows the
wheel's own requirements, and theirs.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(name: str) -> dict[str, str]:
    """Return the version of every package that ``name`` needs here, and of itself."""
    found: dict[str, str] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    seen = set()
    while waiting:
        package, extras = waiting.pop()
        if (package, extras) in seen:
            continue
        seen.add((package, extras))
        try:
            there = distribution(package)
        except PackageNotFoundError:  # not needed on this platform, or left out on purpose
            continue
        found[canonicalize_name(package)] = there.version
        for text in there.requires or []:
            needed = Requirement(text)
            wanted = needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in extras or {""}
            )
            if wanted:
                waiting.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    return dict(sorted(found.items()))


if __name__ == "__main__":
    for package, version in closure("hfedatm").items():
        print(f"{package}=={version}")
