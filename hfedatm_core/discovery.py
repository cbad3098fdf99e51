"""Find a built-in (a model, a data set, ...) by its name: each is one module, in no list.

``find(models, "resnet18", "build")`` imports the module of that name and returns its function.
Adding a model or a data set is therefore adding a file.
"""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any


def suggest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name closest to ``name``, or an empty string."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def available(package: ModuleType, function: str) -> list[str]:
    """Names of all modules in ``package`` that define ``function`` (hyphens for underscores)."""
    names = []
    for module in pkgutil.iter_modules(package.__path__):
        if hasattr(importlib.import_module(f"{package.__name__}.{module.name}"), function):
            names.append(module.name.replace("_", "-"))
    return sorted(names)


def find(package: ModuleType, name: str, function: str, what: str) -> Callable[..., Any]:
    """Return ``function`` of the module ``name`` in ``package``.

    Parameters
    ----------
    package
        The package whose modules are the built-ins.
    name
        The name a user types; hyphens and underscores are the same.
    function
        The function each built-in module defines.
    what
        What the package holds, in the singular, for the error ("model", "data set").

    Raises
    ------
    ValueError
        If there is no such module; the message lists what there is and the nearest name.
    """
    module_name = name.replace("-", "_").lower()
    if module_name in _modules(package):
        module = importlib.import_module(f"{package.__name__}.{module_name}")
        if hasattr(module, function):
            found: Callable[..., Any] = getattr(module, function)
            return found
    names = available(package, function)
    raise ValueError(
        f"unknown {what} {name!r}; available: {', '.join(names)}.{suggest(name, names)}"
    )


def find_subclass(package: ModuleType, name: str, base: type, what: str) -> Any:
    """Return the subclass of ``base`` that the module ``name`` of ``package`` defines.

    Raises
    ------
    ValueError
        If there is no such module; the message lists what there is and the nearest name.
    """
    names = sorted(module.replace("_", "-") for module in _modules(package) - {"base"})
    if name not in names:
        raise ValueError(
            f"unknown {what} {name!r}; available: {', '.join(names)}.{suggest(name, names)}"
        )
    module = importlib.import_module(f"{package.__name__}.{name.replace('-', '_')}")
    return subclass_in(module, base)


def subclass_in(module: ModuleType, base: type) -> Any:
    """Return the subclass of ``base`` that ``module`` defines."""
    return next(
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, base)
        and value.__module__ == module.__name__
    )


def _modules(package: ModuleType) -> set[str]:
    return {module.name for module in pkgutil.iter_modules(package.__path__)}


def check_options(
    function: Callable[..., Any], options: Mapping[str, object], owner: str, reserved: Iterable[str]
) -> None:
    """Refuse an option that ``function`` does not take.

    ``reserved`` names the arguments that the caller passes itself; they are no options.
    """
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    allowed = [name for name in parameters if name not in set(reserved)]
    for name in options:
        if name not in allowed:
            listed = ", ".join(allowed) if allowed else "it has none"
            raise ValueError(
                f"{owner} has no option {name!r}; options: {listed}.{suggest(name, allowed)}"
            )
