"""The policy of a node's owner for runs on the node: a TOML file that only the owner writes.

A deployed process finds its policy by the environment variable ``HFEDATM_POLICY``. Without the
variable the person who starts a run is the owner (one process, simulation), and everything is
allowed. If the variable names no readable policy, the process does no work at all.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from hfedatm.base.environment import POLICY
from hfedatm.base.errors import UserError

NAME = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""How code is named: ``package.module:name``."""


class PolicyError(UserError):
    """A policy file cannot be read or contains an invalid entry."""


class PolicyRefusal(UserError):
    """A run asks for more than the owner of this node allows; the message is one line."""


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        allow_inf_nan=False,
        alias_generator=lambda name: name.replace("_", "-"),
    )


class Data(_Section):
    """Where the data are."""

    folder: str = Field(
        "",
        description="the one folder a run may read, whatever its data-dir says; empty leaves it "
        "to data-dir in the node-config",
    )


class Code(_Section):
    """Code and sources that a run may name besides built-ins and installed entry points."""

    allowed: tuple[str, ...] = Field(
        (), description="code a run may name, each written 'package.module:name'"
    )
    sources: tuple[str, ...] = Field(
        (),
        description="files, folders, packages and hub ids a run's parameters may name, such as "
        "pretrained weights",
    )


class Privacy(_Section):
    """The least privacy, and the most that all runs together may learn."""

    least_mechanism: Literal["none", "example", "client"] = Field(
        "none",
        description="what noise on Grams must hide at least: nothing, one example, or the whole "
        "client; client and paper hide the client and so each of its examples",
    )
    most_clip: float | None = Field(None, gt=0, description="largest privacy.clip")
    most_delta: float | None = Field(
        None, gt=0, lt=1, description="largest privacy.delta; total-epsilon counts at it, or 1e-5"
    )
    least_sigma: float | None = Field(
        None, gt=0, description="smallest noise multiplier, given by a run or derived"
    )
    least_gram_rows: int | None = Field(
        None, ge=1, description="smallest gram-min-rows of a run whose Grams carry no noise"
    )
    dp_sgd: bool = Field(
        False, description="whether weights leave only if trained with DP-SGD (dp-sgd=true)"
    )
    most_dp_sgd_clip: float | None = Field(None, gt=0, description="largest dp-sgd-clip")
    run_epsilon: float | None = Field(None, gt=0, description="most epsilon a run may spend")
    total_epsilon: float | None = Field(
        None, gt=0, description="most epsilon all runs together may ever spend on these data"
    )
    evaluate: bool = Field(
        True,
        description="whether models are scored on validation examples; the exact numbers leave",
    )
    second_look: bool = Field(
        False,
        description="whether means and variances of BatchNorm inputs of a merged model leave "
        "without noise (second_look of the rule hfedatm)",
    )
    refine: bool = Field(
        False,
        description="whether sums over the inputs and outputs of a merged model's layers leave "
        "without noise (refine of the rule hfedatm)",
    )
    class_counts: bool = Field(
        False,
        description="whether numbers or shares of examples by class leave without noise (the rule "
        "fedrc-clusters, 'hfedatm assign --ask')",
    )
    class_profiles: bool = Field(
        False,
        description="whether mean activations per class, and numbers of examples by class, leave "
        "without noise (profiles of the rule hfedatm)",
    )
    least_class_examples: int | None = Field(
        None, ge=2, description="fewest examples of a class whose mean activations leave"
    )
    amplitudes: bool = Field(
        False,
        description="whether low-frequency amplitude spectra of single images leave without noise "
        "(the client method elcfs)",
    )
    model_to_peers: bool = Field(
        False,
        description="whether other clients get the model that this node trained, not only a mean "
        "(the rule fedhisyn)",
    )
    insecure_seed: bool = Field(
        False, description="whether a run may make the noise predictable, which protects nobody"
    )

    @model_validator(mode="after")
    def _limits_that_limit(self) -> Privacy:
        limited = self.run_epsilon is not None or self.total_epsilon is not None
        if limited and self.least_mechanism == "none" and not self.dp_sgd:
            raise ValueError(
                "run-epsilon and total-epsilon count noised replies: also set least-mechanism "
                "(Grams), dp-sgd = true (weights), or both; a run without noise is not counted"
            )
        return self


class SecureSum(_Section):
    """Whether replies may be seen one by one."""

    required: bool = Field(
        False, description="whether what this node trains leaves it only in a secure sum"
    )
    least_clients: int = Field(
        2, ge=2, description="fewest clients of a secure sum this node takes part in"
    )


class Limits(_Section):
    """Limits on what runs cost this machine."""

    epochs: int | None = Field(None, ge=1, description="most local-epochs of a task")
    rounds: int | None = Field(None, ge=1, description="most global rounds of a run")
    seconds: float | None = Field(
        None, gt=0, description="most seconds of a client's task; then it is ended"
    )
    memory_mb: float | None = Field(
        None, gt=0, description="most resident memory of a client's task; beyond it, it is ended"
    )
    reply_mb: float | None = Field(None, gt=0, description="largest reply that leaves this node")
    idle_seconds: float = Field(
        600.0,
        gt=0,
        description="seconds without work after which this machine gives the memory of imported "
        "modules back; the next task imports them again",
    )


class Policy(_Section):
    """The limits that an owner sets for runs on this node."""

    data: Data = Data()
    code: Code = Code()
    privacy: Privacy = Privacy()
    secure_sum: SecureSum = SecureSum()
    limits: Limits = Limits()
    _person: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _names(self) -> Policy:
        for name in self.code.allowed:
            if not re.match(NAME, name):
                raise ValueError(f"code.allowed: got {name!r}; write it 'package.module:name'")
        return self

    @classmethod
    def of_the_person(cls) -> Policy:
        """Return the policy of a process that serves only the person who started it."""
        policy = cls()
        policy._person = True
        return policy

    @property
    def is_owners(self) -> bool:
        """Whether an owner's policy is in force, that is, whether this process is deployed."""
        return not self._person

    @classmethod
    def load(cls, path: Path | str) -> Policy:
        """Read a policy; raises `PolicyError` that names the first thing that is wrong."""
        try:
            with Path(path).expanduser().open("rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise PolicyError(f"policy {path}: {error.strerror or error}") from None
        except ValueError as error:
            raise PolicyError(f"policy {path}: is not TOML: {error}") from None
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise PolicyError(f"policy {path}: {_explain(error.errors()[0])}") from None

    @classmethod
    def current(cls) -> Policy:
        """Return the policy in force; raises `PolicyRefusal` if a required policy is missing."""
        if POLICY not in os.environ:
            return cls.of_the_person()
        try:
            return cls.load(os.environ[POLICY])
        except PolicyError as error:
            raise PolicyRefusal(
                f"this node does no work until its owner corrects its policy: {error}"
            ) from None


def idle_seconds() -> float:
    """Return the seconds without work after which a process of this machine gives memory back."""
    try:
        return Policy.current().limits.idle_seconds
    except PolicyRefusal:  # the reply to the first task will say so
        return Limits().idle_seconds


def fields() -> Iterator[tuple[str, str, str, str]]:
    """Yield section, key, default and meaning of everything a policy may say."""
    for name, section in Policy.model_fields.items():
        kind: Any = section.annotation
        for entry in kind.model_fields.values():
            default = "no limit" if entry.default is None else toml_value(entry.default)
            yield name.replace("_", "-"), str(entry.alias), default, str(entry.description)


def value_of(policy: Policy, section: str, key: str) -> Any:
    """Return the value of a policy under a key."""
    return getattr(getattr(policy, section.replace("-", "_")), key.replace("-", "_"))


def toml_value(value: Any) -> str:
    """Return a value as it is written in a TOML file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _explain(error: Any) -> str:
    """Return one line that says what is wrong; for an unknown key, with a similar known key."""
    message = " ".join(str(error["msg"]).removeprefix("Value error, ").split())
    place = [str(part).replace("_", "-") for part in error["loc"]]
    if error["type"] != "extra_forbidden":
        where = ".".join(place)
        got = f"got {error['input']!r}; " if not isinstance(error["input"], dict) else ""
        return f"{where}: {got}{message}" if where else message
    known = [f"{section}.{key}" for section, key, *_ in fields()]
    if len(place) == 1:
        known = list(dict.fromkeys(name.split(".")[0] for name in known))
    near = difflib.get_close_matches(".".join(place), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
    return f"{'.'.join(place)}: unknown key; {hint}"
