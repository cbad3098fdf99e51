"""Parameters of a plug-in: the fields of its dataclass, with bounds and meaning.

A field may declare its meaning and its bounds, as the settings of a run do:

    beta: float = option(1.0, "share of RegMean", ge=0, le=1)

The type of a field without such a declaration is checked, too. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, field, fields
from functools import cache
from typing import Annotated, Any, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

_ABOUT = "hfedatm.option"
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


class Checked(BaseModel):
    """Values that are converted to their type and kept within bounds; immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )

    @model_validator(mode="after")
    def _carried_by_flower(self) -> Self:
        for name, value in self:
            if isinstance(value, int) and value >= 2**63:
                key = type(self).model_fields[name].alias or name
                raise ValueError(f"{key}: got {value}; must be below 2^63")
        return self


def option(default: Any, meaning: str, *, setting: bool = False, **bounds: float) -> Any:
    """Declare a parameter of a plug-in's dataclass.

    Parameters
    ----------
    default
        Its value unless another is given.
    meaning
        The text that ``hfedatm settings`` shows for it.
    setting
        Whether users of a built-in server rule may also write it as a setting of this name.
    bounds
        ``ge``, ``gt``, ``le``, ``lt``.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Mine:
    ...     step: float = option(1.0, "how far towards the merged model", gt=0, le=1)
    >>> Mine().step
    1.0
    """
    about = {"description": meaning, **bounds}
    return field(default=default, metadata={_ABOUT: (about, setting)})


@cache
def options_of(cls: Any) -> type[Checked]:
    """Return a dataclass's fields as values to be checked; a field without default has None."""
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError:  # a type that only a type checker imports: nothing is known
        hints = {}
    found: dict[str, Any] = {}
    for one in fields(cls):
        if not one.init:
            continue
        about, setting = one.metadata.get(_ABOUT, ({}, False))
        kind = hints.get(one.name, Any)
        if about:
            alias = as_key(one.name) if setting else None
            kind = Annotated[kind, Field(alias=alias, **about)]
        default: Any = None if one.default is MISSING else one.default
        if one.default_factory is not MISSING:
            default = Field(default_factory=one.default_factory)
        found[one.name] = (kind, default)
    return create_model(cls.__name__, __base__=Checked, **found)


def mistakes(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Return a line for each wrong value: key, given value, allowed values, meaning."""
    entries = model.model_fields
    known = {key: entry for name, entry in entries.items() for key in (name, entry.alias)}

    def line(wrong: Any) -> str:
        message = str(wrong["msg"]).removeprefix("Value error, ")
        if not wrong["loc"]:
            return message
        entry = known.get(wrong["loc"][0])
        key = str(entry.alias if entry and entry.alias else wrong["loc"][0])
        about = entry.description if entry else ""
        said = f"{message[0].lower()}{message[1:]}" + (f" ({about})" if about else "")
        return f"{key}: got {wrong['input']!r}; {said}"

    return [line(wrong) for wrong in error.errors()]


def rows_of(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Return key, default, allowed values and meaning of every value."""
    properties = model.model_json_schema(schema_generator=_Schema).get("properties", {})
    return [_row(key, entry) for key, entry in properties.items()]


def _row(key: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    allowed = " | ".join(map(str, entry["enum"])) if "enum" in entry else str(entry.get("type", ""))
    bounds = [f"{sign} {entry[name]:g}" for name, sign in _LIMITS.items() if name in entry]
    return {
        "key": key,
        "default": entry.get("default"),
        "allowed": ", ".join([allowed, *bounds]),
        "meaning": entry.get("description", ""),
    }


def as_key(name: str) -> str:
    """``dp_sgd_clip`` -> ``dp-sgd-clip``."""
    return name.replace("_", "-")


def parse_params(text: str) -> dict[str, Any]:
    """``"mu=0.01, mode=mean"`` -> ``{"mu": 0.01, "mode": "mean"}``."""
    return {name: _number_or_text(value) for name, value in parse_texts(text).items()}


def parse_texts(text: str) -> dict[str, str]:
    """``"mu=0.01, mode=mean"`` -> ``{"mu": "0.01", "mode": "mean"}``."""
    params: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip().replace("-", "_").isidentifier():
            raise ValueError(f"got {part!r}; write 'name=value', separated by commas")
        params[name.strip().replace("-", "_")] = value.strip()
    return params


def _number_or_text(text: str) -> Any:
    for convert in (int, float):  # YAML would read 1e-3 as text
        try:
            return convert(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def write_params(params: dict[str, Any]) -> str:
    """Return the text that `parse_params` reads."""
    return ",".join(
        f"{as_key(name)}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in params.items()
    )


class _Schema(GenerateJsonSchema):
    """A plug-in's own types are shown without their allowed values."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {}
