"""Keys of settings that only a server rule reads.

A field of a built-in rule's dataclass declared with ``setting=True`` is a setting, too:
``ot-reg=0.1`` means the same as ``rule-params=ot-reg=0.1``. Only the rule's file declares it; this
module collects the keys of all rules, so that a key is known wherever settings are written. A rule
without such a field ignores the key, because presets and tables give one set of keys to several
rules.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import create_model

from hfedatm.base.options import Checked, options_of, parse_params, write_params
from hfedatm.base.settings import Settings

if TYPE_CHECKING:
    from hfedatm.contracts import Rule

# Built-in rules are plug-ins of a tier above, so they are found by name like any other.
BUILT_IN_RULES = "server_app.rules"


def find_rule(name: str) -> type[Rule]:
    """Return the class of a server rule."""
    # Late: rules import torch, and a process that only reads settings should not wait for it.
    from hfedatm.base.plugins import find_class
    from hfedatm.contracts import Rule

    package = import_module(BUILT_IN_RULES)
    found: type[Rule] = find_class("server-rule", name, package, Rule, "hfedatm.rules")
    return found


@cache
def built_in_rules() -> dict[str, type[Rule]]:
    """Return the classes of the built-in rules by name."""
    modules = pkgutil.iter_modules(import_module(BUILT_IN_RULES).__path__)
    names = sorted(module.name.replace("_", "-") for module in modules)
    return {name: find_rule(name) for name in names}


@cache
def rule_keys() -> type[Checked]:
    """Return the built-in rules' fields that are settings, too, as values to be checked."""
    found: dict[str, Any] = {}
    for cls in built_in_rules().values():
        for name, field in options_of(cls).model_fields.items():
            if field.alias:
                found.setdefault(name, (Annotated[field.annotation, field], field.default))
    return create_model("RuleKeys", __base__=Checked, **found)


def given_to_rule(settings: Settings) -> dict[str, Any]:
    """Return the rule's parameters: its keys, overridden by ``rule-params``."""
    known = options_of(find_rule(settings.server_rule)).model_fields
    unread = rule_keys().model_fields.keys() - known.keys()
    given = parse_params(settings.rule_keys) | parse_params(settings.rule_params)
    return {name: value for name, value in given.items() if name not in unread}


def carry(checked: Checked) -> str:
    """Return the text that carries checked keys; keys at their default are left out."""
    fields = type(checked).model_fields
    return write_params({n: value for n, value in checked if value != fields[n].default})
