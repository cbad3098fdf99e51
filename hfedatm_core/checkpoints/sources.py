"""Build networks by their usual names: of torchvision, timm, transformers, or a user's function."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfedatm_core.checkpoints.files import Shapes
from hfedatm_core.checkpoints.fitting import class_counts, named_like, shapes_of
from hfedatm_core.data.folder import MEAN, STD
from hfedatm_core.discovery import suggest
from hfedatm_core.inputs import Inputs

FORMS = "torchvision:NAME, timm:NAME, transformers:FOLDER or package.module:function"
Build = Callable[..., Any]


@dataclass(frozen=True)
class Network:
    """A network, an example input, and the mean and standard deviation of its images."""

    model: nn.Module
    example: Inputs
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD


def open_network(
    source: str | Build,
    shape: tuple[int, ...] | None = None,
    like: Shapes | None = None,
    classes: int | None = None,
) -> Network:
    """Build a network without trained weights.

    Parameters
    ----------
    source
        ``torchvision:NAME``, ``timm:NAME``, ``transformers:FOLDER`` (whose ``config.json`` names
        the class), or a function that returns a module, or a module and an example input.
    shape
        Shape of one example, without the batch; needed for a function that returns a module alone.
    like
        Shapes of a checkpoint; the network gets the checkpoint's number of classes.
    classes
        Number of classes, if it is known.
    """
    build = _builder(source) if isinstance(source, str) else _function(source)
    network = build(classes, shape)
    own = shapes_of(network.model.state_dict())
    counts = class_counts(named_like(like or {}, own), own)
    return network if counts is None else build(counts[0], shape)


def _builder(source: str) -> Callable[[int | None, tuple[int, ...] | None], Network]:
    kind, _, name = source.partition(":")
    builders = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}
    if kind not in builders or not name:
        raise ValueError(f"cannot build {source!r}; write {FORMS}")
    return lambda classes, shape: builders[kind](name, classes, shape)


def _torchvision(name: str, classes: int | None, shape: tuple[int, ...] | None) -> Network:
    from torchvision import models

    _require_known(name, models.list_models(module=models), "torchvision")
    options = {} if classes is None else {"num_classes": classes}
    model = models.get_model(name, weights=None, **options)
    side = 299 if name == "inception_v3" else 224
    return Network(model, torch.zeros(1, *(shape or (3, side, side))))


def _timm(name: str, classes: int | None, shape: tuple[int, ...] | None) -> Network:
    try:
        timm: Any = importlib.import_module("timm")  # optional dependency
    except ModuleNotFoundError:
        raise ValueError("timm: models need the package timm; pip install timm") from None
    _require_known(name.partition(".")[0], timm.list_models(), "timm")
    options = {} if classes is None else {"num_classes": classes}
    model = timm.create_model(name, pretrained=False, **options)
    about = model.pretrained_cfg
    size = shape or tuple(about.get("input_size") or (3, 224, 224))
    mean, std = tuple(about.get("mean") or MEAN), tuple(about.get("std") or STD)
    return Network(model, torch.zeros(1, *size), mean, std)


def _transformers(folder: str, classes: int | None, shape: tuple[int, ...] | None) -> Network:
    transformers: Any = importlib.import_module("transformers")  # slow to import
    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"transformers: there is no {path / 'config.json'}")
    options = {} if classes is None else {"num_labels": classes}
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **options)
    named = (config.architectures or [""])[0]
    made = getattr(transformers, named, None)
    model = made(config) if made is not None else transformers.AutoModel.from_config(config)
    if model.main_input_name == "pixel_values":
        side = getattr(config, "image_size", 224)
        sides = (side, side) if isinstance(side, int) else tuple(side)
        size = shape or (getattr(config, "num_channels", 3), *sides)
        return Network(model, {"pixel_values": torch.zeros(1, *size)})
    tokens = torch.zeros(1, *(shape or (8,)), dtype=torch.long)
    return Network(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})


def _function(function: Build) -> Callable[[int | None, tuple[int, ...] | None], Network]:
    name = getattr(function, "__name__", repr(function))

    def build(classes: int | None, shape: tuple[int, ...] | None) -> Network:
        takes = "num_classes" in inspect.signature(function).parameters
        made = function(num_classes=classes) if takes and classes is not None else function()
        model, example = made if isinstance(made, tuple) else (made, None)
        if not isinstance(model, nn.Module):
            raise ValueError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
        if shape is not None:
            example = torch.zeros(1, *shape)
        if not isinstance(example, torch.Tensor | Mapping):
            raise ValueError(
                f"{name} returned no example input: return (model, example) or give the shape of "
                "one example, such as 3x32x32"
            )
        return Network(model, example)

    return build


def _require_known(name: str, known: Iterable[str], where: str) -> None:
    names = list(known)
    if name not in names:
        raise ValueError(f"{where} has no model {name!r}.{suggest(name, names)}")
