"""Turn a user's values into settings, and settings back into the keys that users write.

Settings have three layers: the defaults, the row of ``configs/master-table.yaml`` that ``preset``
names, and the user's values. A value of ``""`` means "not given".
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hfedatm.base.options import mistakes, parse_params
from hfedatm.base.presets import load_presets
from hfedatm.base.rule_keys import carry, rule_keys
from hfedatm.base.settings import CARRIER, Settings, SettingsError, keys
from hfedatm.base.tiers import expand

log = logging.getLogger("hfedatm")

RENAMED = {("server-rule", "fedrc"): "fedrc-weights"}
"""Values that have a new name; the old one works for one minor version, with a notice."""


def resolve(given: Mapping[str, Any]) -> Settings:
    """Layer the user's values over the preset and the defaults, and check the result.

    Raises
    ------
    SettingsError
        The message names each wrong key, the given value and the allowed values.
    """
    chosen = {key: value for key, value in given.items() if value != ""}
    _refuse_unknown(chosen, "settings")
    preset = str(chosen.get("preset", Settings.model_fields["preset"].default))
    rows = load_presets()
    if preset not in rows:
        raise SettingsError(f"preset: got {preset!r}; must be one of {', '.join(sorted(rows))}")
    _refuse_unknown(rows[preset], f"preset {preset!r}")
    try:
        chosen = expand(chosen)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return validate({**rows[preset], **chosen})


def validate(values: Mapping[str, Any]) -> Settings:
    """Check values by key; raises `SettingsError` that names each wrong one."""
    _refuse_unknown(values, "settings")
    run = {key: _renamed(key, value) for key, value in values.items() if key in keys()}
    of_rule = {key: value for key, value in values.items() if key not in run}
    wrong: list[str] = []
    try:
        of_rule |= _keys_in(str(run.get("rule-params", "")))
        if of_rule:
            run[CARRIER] = carry(rule_keys().model_validate(of_rule))
    except ValidationError as error:
        wrong = mistakes(rule_keys(), error)
    try:
        settings = Settings.model_validate(run)
    except ValidationError as error:
        wrong = mistakes(Settings, error) + wrong
    if wrong:
        raise SettingsError("\n".join(wrong))
    return settings


def _renamed(key: str, value: Any) -> Any:
    """Return the new name of a value; a notice says that the old name will go."""
    if not isinstance(value, str) or (key, value) not in RENAMED:
        return value
    new = RENAMED[key, value]
    log.warning("%s=%s is deprecated; it is called %s", key, value, new)
    return new


def as_config(settings: Settings) -> dict[str, Any]:
    """Flat ``key -> value`` with the keys users write."""
    config = settings.model_dump(by_alias=True, exclude={CARRIER})
    carried = rule_keys().model_validate(parse_params(settings.rule_keys))
    return config | carried.model_dump(by_alias=True)


def all_keys() -> list[str]:
    """Every key a user may write: the run's, and those of the built-in server rules."""
    return keys() + [str(field.alias) for field in rule_keys().model_fields.values()]


def _keys_in(rule_params: str) -> dict[str, Any]:
    """Return the values in ``rule-params`` whose keys are also settings."""
    try:
        params = parse_params(rule_params)
    except ValueError:
        return {}  # the check of the settings reports this error with its key
    fields = rule_keys().model_fields if params else {}
    return {str(fields[name].alias): value for name, value in params.items() if name in fields}


def _refuse_unknown(given: Mapping[str, Any], where: str) -> None:
    wrong = [key for key in given if key not in keys()]
    if wrong:  # importing the rules is slow, so only now
        wrong = [key for key in wrong if key not in all_keys()]
    if wrong:
        lines, known = [], all_keys()
        for key in wrong:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
            lines.append(f"{key}: unknown key in {where}; {hint}")
        raise SettingsError("\n".join(lines))
