"""Turn the name in a setting into code: built-in, entry point, or ``package.module:object``.

Built-in names are modules of one package and are found by importing them, so adding one is adding
a file. Other packages can announce theirs under the entry-point groups ``hfedatm.models``,
``hfedatm.datasets``, ``hfedatm.methods``, ``hfedatm.rules``, ``hfedatm.robust``,
``hfedatm.metrics``, ``hfedatm.tasks``, ``hfedatm.augmentations`` and ``hfedatm.trainers``.

In a deployed process, a run can import other code only if the owner's policy lists it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from hfedatm.base.errors import PLUGGED, UserError, explain
from hfedatm.base.options import mistakes, options_of
from hfedatm.base.trust.checking import require_code
from hfedatm.base.trust.policy import Policy
from hfedatm_core.discovery import find, subclass_in, suggest

OWN = "Your own is written 'package.module:name'."


class PluginError(UserError):
    """A named piece of code cannot be found or does not have the needed form."""


def find_function(setting: str, name: str, package: ModuleType, attribute: str, group: str) -> Any:
    """Return the function a setting names; ``attribute`` is its name inside a built-in module."""
    _require_allowed(setting, name)
    return _find_function(setting, name, package, attribute, group)


@cache
def _find_function(setting: str, name: str, package: ModuleType, attribute: str, group: str) -> Any:
    try:
        own = _from_elsewhere(setting, name, package, group)
        return find(package, name, attribute, setting) if own is None else own
    except ValueError as error:
        raise PluginError(f"{setting}: {error} {OWN}") from None


def find_class(setting: str, name: str, package: ModuleType, base: type, group: str) -> Any:
    """Return the subclass of ``base`` a setting names."""
    _require_allowed(setting, name)
    return _find_class(setting, name, package, base, group)


@cache
def _find_class(setting: str, name: str, package: ModuleType, base: type, group: str) -> Any:
    found = _from_elsewhere(setting, name, package, group)
    if found is None:
        found = subclass_in(_builtin(setting, name, package), base)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise PluginError(
            f"{setting}: {name!r} must be a subclass of {base.__module__}.{base.__name__}"
        )
    _check_overrides(setting, found, base)
    return found


def _check_overrides(setting: str, cls: type, base: type) -> None:
    """Refuse a class whose methods cannot be called like those of its base."""
    for name, original in vars(base).items():
        if inspect.isfunction(original) and not name.startswith("_"):
            signature = inspect.signature(original)
            needed = f"{name}({', '.join(signature.parameters)})"
            if name in getattr(cls, "__abstractmethods__", ()):
                raise PluginError(f"{setting}: {cls.__name__} must define {needed}")
            check_call(setting, getattr(cls, name), needed, *signature.parameters)


def import_object(setting: str, path: str, group: str = "") -> Any:
    """Import ``package.module:object``, or the object of an entry point of ``group``.

    This is the only place where text from a run becomes an import.
    """
    if ":" not in path and group:
        for point in entry_points(group=group, name=path):
            return _import(setting, f"{point.module}:{point.attr}")
    _require_allowed(setting, path)
    return _import(setting, path)


def _require_allowed(setting: str, name: str) -> None:
    """Ask the policy before anything is imported, even if the import is cached."""
    if ":" in name:
        require_code(Policy.current(), setting, name)


def _import(setting: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise PluginError(f"{setting}: got {path!r}; write it 'package.module:name'")
    PLUGGED.add(module_name.partition(".")[0])
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PluginError(
            f"{setting}: cannot import {module_name!r} ({error}); install the package that has it "
            "on every node of the run"
        ) from error
    except (Exception, SystemExit) as error:  # a script may end the process when it is imported
        raise PluginError(
            f"{setting}: importing {module_name!r} failed: {explain(error)}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise PluginError(f"{setting}: module {module_name!r} has no {attribute!r}") from None


def check_call(
    setting: str, function: Callable[..., Any], signature: str, *args: str, **named: str
) -> None:
    """Refuse a function that cannot be called with these; the message shows ``signature``."""
    if not callable(function):
        raise PluginError(f"{setting}: {function!r} is not callable; it must be {signature}")
    try:
        inspect.signature(function).bind(*args, **named)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise PluginError(
            f"{setting}: {name}{inspect.signature(function)} cannot be called as needed ({error}); "
            f"it must be {signature}"
        ) from None


@contextmanager
def calling(setting: str, name: str) -> Iterator[None]:
    """Turn any error of the code that a setting names into one message with setting and name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Messages of built-ins explain themselves; errors of other code need their kind and place.
        worded = ":" not in name and isinstance(error, ValueError | TypeError | OSError)
        raise PluginError(f"{setting}: {error if worded else explain(error)}") from error


def construct(setting: str, cls: Any, params: dict[str, Any]) -> Any:
    """Make a dataclass from the user's parameters; unknown and wrong ones are refused by name."""
    options = options_of(cls)
    known = list(options.model_fields)
    for name in params:
        if name not in known:
            raise PluginError(
                f"{setting}: {cls.__name__} has no parameter {name!r}; "
                f"it has: {', '.join(known) or 'none'}.{suggest(name, known)}"
            )
    try:
        checked = options.model_validate(params)
    except ValidationError as error:
        wrong = (f"{setting}: {line}" for line in mistakes(options, error))
        raise PluginError("\n".join(wrong)) from None
    try:
        return cls(**{name: getattr(checked, name) for name in params})
    except (TypeError, ValueError) as error:
        raise PluginError(f"{setting}: {error}") from error


def _from_elsewhere(setting: str, name: str, package: ModuleType, group: str) -> Any:
    """Return the object that a path or an entry point names; None if it must be a built-in."""
    if ":" in name:
        return import_object(setting, name)
    # Built-ins first: searching all installed packages takes longer than a small round.
    if name.replace("-", "_").lower() in {m.name for m in pkgutil.iter_modules(package.__path__)}:
        return None
    for point in entry_points(group=group, name=name):
        return _import(setting, f"{point.module}:{point.attr}")
    return None


def _builtin(setting: str, name: str, package: ModuleType) -> ModuleType:
    names = (info.name for info in pkgutil.iter_modules(package.__path__))
    known = [name.replace("_", "-") for name in names if name != "base"]
    if name not in known:
        raise PluginError(
            f"{setting}: got {name!r}; available: {', '.join(known)}.{suggest(name, known)} {OWN}"
        )
    return importlib.import_module(f"{package.__name__}.{name.replace('-', '_')}")
