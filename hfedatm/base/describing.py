"""Rows of ``hfedatm settings``: every key of a run, and every parameter of a server rule."""

from __future__ import annotations

from typing import Any

from hfedatm.base.options import as_key, options_of, rows_of
from hfedatm.base.rule_keys import built_in_rules, find_rule, rule_keys
from hfedatm.base.settings import CARRIER, Settings


def describe(*own_rules: str) -> list[dict[str, Any]]:
    """Return key, default, allowed values, meaning, and the server rules that alone read the key.

    ``own_rules`` names further server rules, written as in the setting ``server-rule``. A parameter
    that is not a setting itself has the key ``rule-params=name``.
    """
    run = [{**row, "rules": []} for row in rows_of(Settings) if row["key"] != as_key(CARRIER)]
    return run + _of_rules(*own_rules)


def _of_rules(*own: str) -> list[dict[str, Any]]:
    flat = {field.alias for field in rule_keys().model_fields.values()}
    found: list[dict[str, Any]] = []
    for name, cls in (built_in_rules() | {name: find_rule(name) for name in own}).items():
        for row in rows_of(options_of(cls)):
            if row["key"] not in flat:
                row["key"] = f"rule-params={row['key']}"
            for other in found:  # a variant shares most parameters with its rule
                if {**row, "rules": other["rules"]} == other:
                    other["rules"].append(name)
                    break
            else:
                found.append({**row, "rules": [name]})
    return sorted(found, key=lambda row: row["key"] not in flat)
