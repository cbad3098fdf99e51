"""The names that ``peft`` gives to the modules with the two factors of an adapter ``B A``."""

from __future__ import annotations

from collections.abc import Container

FIRST, SECOND = "lora_A", "lora_B"


def second_factor(first: str, state: Container[str]) -> str:
    """Return the module with ``B`` if ``first`` is the module with an adapter's ``A``, else ''."""
    before, between, after = first.rpartition(f".{FIRST}.")
    second = f"{before}.{SECOND}.{after}"
    return second if between and f"{second}.weight" in state else ""


def is_second_factor(name: str) -> bool:
    """Tell whether a module holds an adapter's ``B``, whose input needs no Gram."""
    return f".{SECOND}." in name
