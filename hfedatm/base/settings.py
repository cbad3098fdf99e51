"""Every setting of a run, with its default, its bounds and what it means.

Settings are flat ``key = scalar`` pairs, because that is what ``flwr run -c`` carries. They are
resolved in three layers: the defaults below, the row of ``configs/master-table.yaml`` that
``preset`` names, and whatever the user gave. A value of ``""`` means "not given".
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hfedatm.base.errors import UserError
from hfedatm.base.privacy_settings import check_privacy_settings

LONGEST = 7 * 24 * 3600
"""Seconds a time limit may have."""


class SettingsError(UserError):
    """A setting is unknown, malformed or out of bounds."""


def _key(name: str) -> str:
    """``dp_sgd_clip`` -> ``dp-sgd-clip``."""
    return name.replace("_", "-")


class Settings(BaseModel):
    """The resolved settings of one run; immutable, and equal on every tier."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        alias_generator=_key,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )

    preset: str = Field("demo", description="row of the table of hyper-parameters to start from")

    # --- data and who holds it
    dataset: str = Field(
        "digits", description="built-in name, entry point, or 'package.module:function'"
    )
    dataset_params: str = Field("", description="'key=value,...' for the data set's load function")
    data_dir: str = Field("", description="folder above the data set's own folder")
    target_domain: str = Field("45", description="the domain no client ever trains on")
    stations: int = Field(4, ge=1)
    clients_per_station: int = Field(3, ge=1)
    lam: float = Field(
        0.0,
        ge=0,
        le=1,
        alias="lambda",
        description="heterogeneity: 0 gives each client its own domains, 1 mixes all evenly",
    )
    station_assignment: Literal["domain", "mixed"] = "domain"
    validation_fraction: float = Field(
        0.1, ge=0, lt=1, description="held out per class, per client"
    )

    # --- model and local training
    model: str = Field(
        "lenet5", description="built-in name, entry point, or 'package.module:function'"
    )
    model_params: str = Field("", description="'key=value,...' for the model's build function")
    client_method: str = Field(
        "fedavg", description="built-in name, entry point, or 'package.module:Class'"
    )
    client_params: str = Field("", description="'key=value,...' for the client method")
    train_fn: str = Field(
        "",
        description="entry point or 'package.module:function' that replaces the training loop",
    )
    local_epochs: int = Field(5, ge=1, description="E, epochs per station round")
    batch_size: int = Field(16, ge=1)
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = Field(0.05, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd, or beta1 of adamw")
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["cosine", "constant"] = "cosine"

    # --- rounds
    server_rule: str = Field(
        "hfedatm", description="built-in name, entry point, or 'package.module:Class'"
    )
    rule_params: str = Field("", description="'key=value,...' for the server rule")
    rounds: int = Field(5, ge=1, description="global rounds")
    station_rounds: int = Field(2, ge=1, description="N, station rounds per global round")
    station_start: Literal["shared", "own"] = Field(
        "shared", description="round 1 starts from one model, or from one of each station's own"
    )
    client_fraction: float = Field(
        1.0, gt=0, le=1, description="share of clients per station round"
    )
    broadcast: Literal["auto", "merged", "average"] = Field(
        "auto",
        description="what hfedatm's stations go on from: the published model, the aligned "
        "stations' mean, or the mean unless alignment moved a channel",
    )
    evaluate_every: int = Field(1, ge=1, description="evaluate in every n-th round and in the last")

    # --- alignment (FOT)
    ot_solver: Literal["sinkhorn", "exact"] = "sinkhorn"
    ot_scope: Literal["conv", "all"] = "conv"
    ot_reg: float = Field(0.05, gt=0, description="entropic regularisation of the transport plan")
    ot_iterations: int = Field(25, ge=1)
    ot_margin: float = Field(0.0, ge=0, lt=1, description="relative gain a permutation must bring")
    reference: Literal["first", "previous", "medoid"] = "first"

    # --- RegMean and Gram matrices
    alpha: float = Field(0.75, ge=0, le=1, description="shrinkage of a Gram towards its diagonal")
    ridge: float = Field(1e-6, ge=0, description="relative to the mean diagonal")
    regmean_weights: Literal["clients", "examples"] = "clients"
    regmean_bias: Literal["mean", "exact"] = "mean"
    regmean_conv: bool = False
    gram_weights: Literal["uniform", "examples"] = "uniform"
    gram_model: Literal["client", "station"] = Field(
        "client", description="measure Grams at each client's trained model or the station's mean"
    )
    gram_batches: int = Field(0, ge=0, description="mini-batches a Gram is made of; 0 is all")
    gram_max_dim: int = Field(4096, ge=1, description="wider layers send a low-rank factor")
    gram_rank: int = Field(256, ge=1)
    gram_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float16", description="of a Gram on the wire; 16 bits come with a scale per matrix"
    )
    gram_min_rows: int = Field(64, ge=1, description="smaller Grams are refused unless DP is on")

    # --- privacy
    privacy_mechanism: Literal["none", "example", "client", "paper"] = Field(
        "none", alias="privacy.mechanism", description="whose contribution Gram noise hides"
    )
    privacy_clip: float = Field(
        1.0, gt=0, alias="privacy.clip", description="bound of that contribution, per Gram"
    )
    privacy_epsilon: float = Field(
        0.0, ge=0, alias="privacy.epsilon", description="budget of the whole run; 0 is not given"
    )
    privacy_delta: float = Field(1e-5, gt=0, lt=1, alias="privacy.delta")
    privacy_sigma: float = Field(
        0.0, ge=0, alias="privacy.sigma", description="noise multiplier; 0 derives it from epsilon"
    )
    privacy_rank: int = Field(
        0, ge=0, alias="privacy.rank", description="eigenvalues kept by 'paper'; 0 is all"
    )
    privacy_insecure_dp_seed: int = Field(
        -1,
        ge=-1,
        alias="privacy.insecure-dp-seed",
        description="makes the noise repeatable and so useless as protection; -1 is off",
    )
    dp_sgd: bool = Field(False, description="train with Opacus: protects the weights")
    dp_sgd_clip: float = Field(1.0, gt=0, description="bound of an example's gradient")
    fix_model: bool = Field(False, description="replace BatchNorm by GroupNorm on every tier")
    secure_aggregation: bool = Field(
        False, description="stations see the sum of their clients' replies, and none of them"
    )
    secure_threshold: float = Field(
        0.6, gt=0.5, le=1, description="share of the clients that must stay for a secure sum"
    )

    # --- where it runs, what happens when a node fails
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")
    threads: int = Field(
        1, ge=0, le=1024, description="CPU threads per client; 0 leaves it to torch"
    )
    seed: int = Field(0, ge=0, lt=2**63)
    client_timeout: float = Field(
        600.0, gt=0, le=LONGEST, description="seconds a station waits for a client"
    )
    station_timeout: float = Field(
        7200.0, gt=0, le=LONGEST, description="seconds the server waits for a station"
    )
    join_timeout: float = Field(
        120.0, gt=0, le=LONGEST, description="seconds to wait for nodes at the start"
    )
    client_quorum: float = Field(
        0.5, ge=0, le=1, description="share of the asked clients that must answer"
    )
    station_quorum: float = Field(
        0.5, ge=0, le=1, description="share of the stations that must answer"
    )
    max_examples: int = Field(
        1_000_000, ge=1, description="a client that claims to have more is left out"
    )
    bound_factor: float = Field(
        2.0, ge=0, description="times the median that an update may move a tensor; 0 is no bound"
    )
    claim_factor: float = Field(
        3.0, ge=0, description="times the median that a node's examples count; 0 is no bound"
    )
    least_agreement: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="of the median agreement that an update must reach to enter; 0 is off",
    )
    robust_clients: str = Field(
        "none", description="robust rule of the stations: built-in name or 'package.module:Class'"
    )
    robust_stations: str = Field(
        "none", description="robust rule of the server: built-in name or 'package.module:Class'"
    )
    robust_liars: int = Field(
        1, ge=0, description="hostile children of one parent that a robust rule withstands"
    )
    max_fall: float = Field(
        0.25, ge=0, le=1, description="fall of source accuracy that undoes a round; 0 is off"
    )
    max_reply_mb: float = Field(
        0.0,
        ge=0,
        description="larger replies are dropped; 0: those that are larger than the model's can be",
    )

    # --- results
    output: str = Field("results", description="folder that holds one folder per run")
    run_name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]*)?$",
        description="name of the run's folder; empty makes one",
    )
    resume: str = Field("", description="folder of a run to continue")
    diagnostics: bool = Field(
        True, description="keep what the report shows of the first and last round"
    )
    track: str = Field("", description="also log to: tensorboard, mlflow, wandb (comma-separated)")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, value in self:
            if isinstance(value, int) and value >= 2**63:
                key = Settings.model_fields[name].alias
                raise ValueError(f"{key}: got {value}; must be below 2^63")
        for key in ("dataset_params", "model_params", "client_params", "rule_params"):
            try:
                parse_params(getattr(self, key))
            except ValueError as error:
                raise ValueError(f"{_key(key)}: {error}") from None
        check_privacy_settings(self)
        self._check_robust()
        return self

    def _check_robust(self) -> None:
        if self.secure_aggregation and self.robust_clients != "none":
            raise ValueError(
                f"robust-clients: got {self.robust_clients!r}; with secure-aggregation a station "
                "sees only a sum: choose none, and let the server compare stations "
                "(robust-stations)"
            )
        if self.station_start == "own" and self.robust_stations != "none":
            raise ValueError(
                f"robust-stations: got {self.robust_stations!r}; with station-start=own the "
                "stations' models cannot be compared number by number: choose none"
            )

    @property
    def num_clients(self) -> int:
        """Clients of all stations together."""
        return self.stations * self.clients_per_station

    def as_config(self) -> dict[str, Any]:
        """Flat ``key -> value`` with the keys users write."""
        return self.model_dump(by_alias=True)


def keys() -> list[str]:
    """Every key a user may write."""
    return [field.alias or _key(name) for name, field in Settings.model_fields.items()]


def describe() -> list[dict[str, Any]]:
    """Return key, default, what is allowed and meaning of every setting."""
    properties = Settings.model_json_schema(by_alias=True)["properties"]
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    rows = []
    for key, entry in properties.items():
        allowed = " | ".join(map(str, entry["enum"])) if "enum" in entry else str(entry["type"])
        bounds = [f"{sign} {entry[name]:g}" for name, sign in limits.items() if name in entry]
        rows.append(
            {
                "key": key,
                "default": entry["default"],
                "allowed": ", ".join([allowed, *bounds]),
                "meaning": entry.get("description", ""),
            }
        )
    return rows


def resolve(given: Mapping[str, Any]) -> Settings:
    """Layer what the user gave over the preset over the defaults, and check it.

    Raises
    ------
    SettingsError
        Naming each wrong key, what was given and what is allowed.
    """
    chosen = {key: value for key, value in given.items() if value != ""}
    _refuse_unknown(chosen, "settings")
    preset = str(chosen.get("preset", Settings.model_fields["preset"].default))
    rows = load_presets()
    if preset not in rows:
        raise SettingsError(f"preset: got {preset!r}; must be one of {', '.join(sorted(rows))}")
    _refuse_unknown(rows[preset], f"preset {preset!r}")
    return validate({**rows[preset], **chosen})


def validate(values: Mapping[str, Any]) -> Settings:
    """Check values by key; raises `SettingsError` that names each wrong one."""
    _refuse_unknown(values, "settings")
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError("\n".join(map(_explain, error.errors()))) from None


def load_presets() -> dict[str, dict[str, Any]]:
    """Rows of the table of hyper-parameters; a row may be ``based-on`` another."""
    path = _table_path()
    table = read_yaml(path).get("presets", {})

    def row(name: str, *above: str) -> dict[str, Any]:
        if name not in table or name in above:
            raise SettingsError(
                f"{path}: preset {above[-1]!r} is based on {name!r}, "
                f"which {'leads back to it' if name in above else 'is not there'}"
            )
        own = dict(table[name] or {})
        base = own.pop("based-on", None)
        return {**(row(base, *above, name) if base else {}), **own}

    return {name: row(name) for name in table}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the ``key: value`` lines of a YAML file."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path}: must hold 'key: value' lines")
    return {str(key): value for key, value in loaded.items()}


def _table_path() -> Path:
    package = Path(__file__).parents[1]
    # An installed wheel carries the folder inside the package; a checkout and a FAB beside it.
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "master-table.yaml").is_file():
            return folder / "master-table.yaml"
    raise SettingsError("configs/master-table.yaml is missing: reinstall hfedatm")


def parse_params(text: str) -> dict[str, Any]:
    """``"mu=0.01, mode=mean"`` -> ``{"mu": 0.01, "mode": "mean"}``."""
    params: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip().replace("-", "_").isidentifier():
            raise ValueError(f"got {part!r}; write 'name=value', separated by commas")
        params[name.strip().replace("-", "_")] = _number_or_text(value.strip())
    return params


def _number_or_text(text: str) -> Any:
    for convert in (int, float):  # YAML would read 1e-3 as text
        try:
            return convert(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _refuse_unknown(given: Mapping[str, Any], where: str) -> None:
    known = keys()
    wrong = [key for key in given if key not in known]
    if wrong:
        lines = []
        for key in wrong:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
            lines.append(f"{key}: unknown key in {where}; {hint}")
        raise SettingsError("\n".join(lines))


def _explain(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    key = str(error["loc"][0])
    field = next((f for n, f in Settings.model_fields.items() if key in (f.alias, _key(n))), None)
    meaning = f" ({field.description})" if field is not None and field.description else ""
    return f"{key}: got {error['input']!r}; {message[0].lower()}{message[1:]}{meaning}"
