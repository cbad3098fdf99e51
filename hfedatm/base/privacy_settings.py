"""What the privacy settings of a run mean: contradictions in them, and what they protect."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfedatm.base.settings import Settings


def check_privacy_settings(s: Settings) -> None:
    """Raise ``ValueError`` for settings that would protect less than they say."""
    if is_private(s) and not (s.privacy_epsilon or s.privacy_sigma):
        asked = "dp-sgd" if s.dp_sgd else f"privacy.mechanism = {s.privacy_mechanism!r}"
        raise ValueError(f"{asked} needs a noise level: set privacy.epsilon or privacy.sigma")
    if (s.privacy_epsilon or s.privacy_sigma) and not is_private(s):
        raise ValueError(
            "privacy.epsilon or privacy.sigma is set but nothing is noised: "
            "set privacy.mechanism (Grams), dp-sgd=true (weights), or both"
        )
    if s.privacy_rank and s.privacy_mechanism != "paper":
        raise ValueError("privacy.rank: only privacy.mechanism = 'paper' bounds the rank")
    if s.dp_sgd and s.train_fn:
        raise ValueError(
            "train-fn: cannot be used with dp-sgd=true, which replaces the training loop; make "
            "your own loop private with hfedatm_core.privacy.dpsgd and switch dp-sgd off"
        )
    if s.secure_aggregation:
        _check_secure(s)


def _check_secure(s: Settings) -> None:
    if (asked := clients_asked(s)) < 2:
        raise ValueError(
            f"secure-aggregation: a sum over {asked} client is that client; let at least 2 clients "
            "of a station take part (clients-per-station, client-fraction)"
        )
    # Shared noise hides everybody equally only in a sum to which all contribute equally.
    needed = {"none": s.gram_weights, "example": "examples"}.get(s.privacy_mechanism, "uniform")
    if s.gram_weights != needed:
        raise ValueError(
            f"gram-weights: secure-aggregation with privacy.mechanism = {s.privacy_mechanism!r} "
            f"shares the noise among clients, which is right for gram-weights = {needed!r} only"
        )


def is_private(s: Settings) -> bool:
    """Whether anything is noised."""
    return s.dp_sgd or s.privacy_mechanism != "none"


def clients_asked(s: Settings, clients: int | None = None) -> int:
    """Return how many of a station's clients take part in a station round."""
    return max(1, round(s.client_fraction * (clients or s.clients_per_station)))


def secure_threshold(s: Settings, asked: int) -> int:
    """Return how many of the asked clients must stay to the end of a secure sum."""
    return max(2, math.ceil(s.secure_threshold * asked - 1e-9))


def gram_examples(s: Settings, examples: int) -> int:
    """Return how many of a client's examples its Grams are made of, and so what they weigh."""
    return min(examples, s.gram_batches * s.batch_size or examples)


def statement(s: Settings, grams: bool = True) -> str:
    """Say in a sentence or two what this run protects and what it does not.

    ``grams`` tells whether the server's rule asks for Gram matrices at all.
    """
    noised = grams and s.privacy_mechanism != "none"
    whom = "one example" if s.privacy_mechanism == "example" else "one client's Gram"
    if noised and s.dp_sgd:
        text = (
            f"weights (dp-sgd) and Grams (noise that hides {whom}) are differentially private; "
            "numbers of examples and validation counts are not"
        )
    elif noised:
        text = (
            f"Grams are noised so that {whom} cannot be told from them, but the weights every "
            "client sends are NOT private: dp-sgd=true protects them"
        )
    elif s.dp_sgd:
        text = "the weights are differentially private (dp-sgd)"
        if grams:
            text += (
                ", but Grams are sent WITHOUT noise and tell about single examples: "
                "privacy.mechanism protects them"
            )
    else:
        text = "nothing is noised: weights" + (" and Grams" if grams else "") + " tell of the data"
    if s.secure_aggregation:
        text += "; a station sees only the sum of its clients' replies (secure aggregation)"
    if s.privacy_insecure_dp_seed >= 0 and is_private(s):
        text += (
            f"; privacy.insecure-dp-seed={s.privacy_insecure_dp_seed} makes all of the noise "
            "PREDICTABLE: this run protects nobody"
        )
    return text + "."
