"""The meaning of a run's privacy settings: their contradictions, and what they protect."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from hfedatm.base.built_ins import built_in_names

if TYPE_CHECKING:
    from hfedatm.base.settings import Settings
    from hfedatm_core.privacy.mechanisms.base import Mechanism as GramMechanism

MECHANISMS = "hfedatm_core.privacy.mechanisms"
"""Package of the built-in mechanisms, one module each."""


def _known(name: str) -> str:
    if name not in (names := built_in_names(MECHANISMS)):
        raise ValueError(f"must be one of {', '.join(map(repr, names))}")
    return name


def _schema(schema: dict[str, Any]) -> None:
    schema["enum"] = built_in_names(MECHANISMS)


Mechanism = Annotated[str, AfterValidator(_known), Field(json_schema_extra=_schema)]
"""The name of a mechanism in the settings."""


def gram_mechanism(s: Settings) -> GramMechanism:
    """Return the mechanism that makes the Grams of a run private, with its settings."""
    from hfedatm_core.privacy.mechanisms import find_mechanism  # late: it imports torch

    cls = find_mechanism(s.privacy_mechanism)
    return cls(**{field.name: getattr(s, f"privacy_{field.name}") for field in fields(cls)})


def check_privacy_settings(s: Settings) -> None:
    """Raise ``ValueError`` for settings that would protect less than they promise."""
    if is_private(s) and not (s.privacy_epsilon or s.privacy_sigma):
        asked = "dp-sgd" if s.dp_sgd else f"privacy.mechanism = {s.privacy_mechanism!r}"
        raise ValueError(f"{asked} needs a noise level: set privacy.epsilon or privacy.sigma")
    if (s.privacy_epsilon or s.privacy_sigma) and not is_private(s):
        raise ValueError(
            "privacy.epsilon or privacy.sigma is set but nothing is noised: "
            "set privacy.mechanism (Grams), dp-sgd=true (weights), or both"
        )
    if s.privacy_rank and not hasattr(gram_mechanism(s), "rank"):
        names = ", ".join(map(repr, _with_setting("rank")))
        raise ValueError(f"privacy.rank: only privacy.mechanism = {names} bounds the rank")
    if s.dp_sgd and s.train_fn:
        raise ValueError(
            "train-fn: cannot be used with dp-sgd=true, which replaces the training loop; make "
            "your own loop private with hfedatm_core.privacy.dpsgd and switch dp-sgd off"
        )
    if s.gram_layers == "all" and not sends_plain_grams(s):
        raise ValueError(
            "gram-layers: got 'all'; noise and secure sums support only Grams of Linear layers: "
            "choose linear, or auto, which then measures those"
        )
    if s.secure_aggregation:
        _check_secure(s)


def _with_setting(name: str) -> list[str]:
    """Return the mechanisms that have a setting of this name."""
    from hfedatm_core.privacy.mechanisms import find_mechanism

    return [m for m in built_in_names(MECHANISMS) if hasattr(find_mechanism(m), name)]


def _check_secure(s: Settings) -> None:
    if (asked := clients_asked(s)) < 2:
        raise ValueError(
            f"secure-aggregation: a sum over {asked} client is that client's reply; let at least 2 "
            "clients of a station take part (clients-per-station, client-fraction)"
        )
    # Shared noise hides all clients equally only if all contribute equally to the sum.
    needed = gram_mechanism(s).weights
    if needed and s.gram_weights != needed:
        raise ValueError(
            f"gram-weights: secure-aggregation with privacy.mechanism = {s.privacy_mechanism!r} "
            f"shares the noise among clients, which is right only for gram-weights = {needed!r}"
        )


def is_private(s: Settings) -> bool:
    """Whether anything is noised."""
    return s.dp_sgd or gram_mechanism(s).noised


def sends_plain_grams(s: Settings) -> bool:
    """Whether clients send their Grams neither noised nor masked."""
    return not gram_mechanism(s).noised and not s.secure_aggregation


def why_not_exact(s: Settings) -> str:
    """Return why clients may not send exact statistics or class means; empty if they may."""
    if s.secure_aggregation:
        return "secure-aggregation=true allows only secure sums"
    if is_private(s):
        return "the run hides the clients' data by noise, and these numbers have none"
    return ""


def clients_asked(s: Settings, clients: int | None = None) -> int:
    """Return how many of a station's clients take part in a station round."""
    return max(1, round(s.client_fraction * (clients or s.clients_per_station)))


def secure_threshold(s: Settings, asked: int) -> int:
    """Return how many of the asked clients must stay to the end of a secure sum."""
    return max(2, math.ceil(s.secure_threshold * asked - 1e-9))


def gram_examples(s: Settings, examples: int) -> int:
    """Return how many examples a client's Grams are made of, which is also their weight."""
    return min(examples, s.gram_batches * s.batch_size or examples)


def statement(s: Settings, grams: bool = True) -> str:
    """Return one or two sentences on what this run protects and what it does not.

    ``grams`` tells whether the server's rule asks for Gram matrices at all.
    """
    mechanism = gram_mechanism(s)
    noised, whom = grams and mechanism.noised, mechanism.whom
    if noised and s.dp_sgd:
        text = (
            f"weights (dp-sgd) and Grams (noise that hides {whom}) are differentially private; "
            "numbers of examples and validation counts are not"
        )
    elif noised:
        text = (
            f"Grams are noised to hide {whom}, but the weights that every client sends are NOT "
            "private: dp-sgd=true protects them"
        )
    elif s.dp_sgd:
        text = "the weights are differentially private (dp-sgd)"
        if grams:
            text += (
                ", but Grams are sent WITHOUT noise and reveal single examples: "
                "privacy.mechanism protects them"
            )
    else:
        text = "nothing is noised: weights" + (" and Grams" if grams else "") + " reveal data"
    if s.secure_aggregation:
        text += "; a station sees only the sum of its clients' replies (secure aggregation)"
    if s.privacy_insecure_dp_seed >= 0 and is_private(s):
        text += (
            f"; privacy.insecure-dp-seed={s.privacy_insecure_dp_seed} makes all of the noise "
            "PREDICTABLE: this run protects nobody"
        )
    return text + "."
