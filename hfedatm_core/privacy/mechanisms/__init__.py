"""Mechanisms, which make a client's Grams private. Each is one file, found by its name.

=============  ==================================================  =====================
mechanism      released                                            sensitivity
=============  ==================================================  =====================
``none``       the client's Gram as it is                          unbounded
``example``    sum of x x^T, each example's rows clipped to c      c^2
``client``     the client's Gram, Frobenius norm clipped to C      C
``paper``      the client's Gram, spectral norm clipped to S       S * sqrt(rank)
=============  ==================================================  =====================

Only built-in mechanisms exist. A mechanism itself declares what it hides, and the owner of a node
could not verify the declaration of a mechanism that a run supplied.
"""

from __future__ import annotations

import sys
from functools import cache

from hfedatm_core.discovery import find_subclass
from hfedatm_core.privacy.mechanisms.base import Mechanism


@cache
def find_mechanism(name: str) -> type[Mechanism]:
    """Return the mechanism of this name; raises ``ValueError`` that lists all names."""
    package = sys.modules[__name__]
    found: type[Mechanism] = find_subclass(package, name, Mechanism, "mechanism")
    return found
