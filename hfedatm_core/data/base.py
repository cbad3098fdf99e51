"""The interface of a data set: domains in memory (or memory-mapped), and batches of them."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hfedatm_core.discovery import suggest

Inputs = Tensor | dict[str, Tensor]
Batch = tuple[Inputs, Tensor]
SHAPES = {"image": "(channels, height, width)", "text": "(tokens,)", "vector": "(features,)"}


@dataclass(frozen=True)
class DataSpec:
    """The description of the data that a model is built from.

    Attributes
    ----------
    kind
        ``"image"``, ``"text"``, or ``"vector"`` (tables, features of a frozen network).
    num_classes
        Number of classes, or of labels; with ``outputs`` it becomes that number, so that a model
        for classes also serves other tasks.
    input_shape
        One example: ``(channels, height, width)``, ``(tokens,)`` or ``(features,)``.
    class_names
        One name per class, or empty.
    vocab_size
        Number of token ids (text only).
    tokenizer
        The tokenizer that made the ids, so that a pretrained model can refuse foreign ids.
    mean, std
        Per-channel constants; a stored uint8 image reaches the model as ``(x/255 - mean) / std``.
    outputs
        How many numbers a network returns for an example, instead of ``num_classes``, if the task
        has no classes.
    target_mean, target_std
        Constants of the targets of a regression, which learns ``(target - mean) / std``: one for
        all outputs, or one for each.
    """

    kind: Literal["image", "text", "vector"]
    num_classes: int = 0
    input_shape: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()
    vocab_size: int | None = None
    tokenizer: str | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    outputs: int = 0
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a description that contradicts itself."""
        if self.kind not in SHAPES:
            raise ValueError(f"kind must be one of {', '.join(SHAPES)}, not {self.kind!r}")
        if self.outputs:
            if self.outputs < 1 or self.num_classes not in (0, self.outputs):
                raise ValueError(
                    f"give num_classes or outputs, not both ({self.num_classes}, {self.outputs})"
                )
            object.__setattr__(self, "num_classes", self.outputs)
        elif self.num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, not {self.num_classes}")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"{len(self.class_names)} class names were given for {self.num_classes} classes"
            )
        dimensions = 3 if self.kind == "image" else 1
        if len(self.input_shape) != dimensions or min(self.input_shape) < 1:
            raise ValueError(
                f"input_shape of {self.kind} data must be {SHAPES[self.kind]}, "
                f"not {self.input_shape}"
            )
        if self.kind == "text" and (self.vocab_size is None or self.vocab_size < 1):
            raise ValueError(f"text data needs a positive vocab_size, not {self.vocab_size}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if self.kind == "image" and values and len(values) != self.input_shape[0]:
                raise ValueError(
                    f"{name} has {len(values)} values for {self.input_shape[0]} channels"
                )
        for name, values in (("std", self.std), ("target_std", self.target_std)):
            if any(value <= 0 for value in values):
                raise ValueError(f"{name} must be positive, not {values}")

    def example(self, batch: int = 2) -> Inputs:
        """Return small valid inputs, always the same ones, for tracing a model."""
        generator = torch.Generator().manual_seed(0)
        shape = (batch, *self.input_shape)
        if self.vocab_size is None or self.kind != "text":
            return torch.randn(shape, generator=generator)
        return {
            "input_ids": torch.randint(self.vocab_size, shape, generator=generator),
            "attention_mask": torch.ones(shape, dtype=torch.long),
        }

    def token_wise(self, inputs: Mapping[str, Tensor]) -> set[str]:
        """Return the inputs whose second axis counts the tokens of a text."""
        mask = inputs.get("attention_mask")
        if mask is None:
            return set()
        return {name for name, tensor in inputs.items() if tensor.shape[1:] == mask.shape[1:]}


@dataclass(frozen=True, eq=False)
class Domain:
    """The examples of one domain.

    ``inputs`` is a tensor (uint8 images, or floats that are used as they are) or a dict of tensors
    (text); its rows and those of ``targets`` belong together. It may be memory-mapped: only the
    rows that are used are read.
    """

    name: str
    inputs: Inputs
    targets: Tensor

    def __post_init__(self) -> None:
        """Refuse inputs and targets of different length."""
        parts = self.inputs if isinstance(self.inputs, Mapping) else {"inputs": self.inputs}
        for key, tensor in parts.items():
            if len(tensor) != len(self.targets):
                raise ValueError(
                    f"domain {self.name!r}: {key} has {len(tensor)} examples, "
                    f"targets has {len(self.targets)}"
                )

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.targets)

    def subset(self, indices: Tensor) -> "Domain":
        """Return the examples at ``indices`` (a LongTensor), in that order, as a copy."""
        return Domain(self.name, _rows(self.inputs, indices), self.targets[indices])


@dataclass(frozen=True, eq=False)
class DomainData:
    """A data set: its description and its domains by name.

    ``aliases`` maps other names that users type (``"L38"``) to the names in ``domains``. A function
    that loads data may also put data sets of torch or Hugging Face into ``domains``
    (`hfedatm_core.data.adapting`).
    """

    spec: DataSpec
    domains: dict[str, Domain]
    aliases: dict[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return the domain that a user means by ``name``.

        Case, spaces, hyphens and underscores do not matter, and aliases are understood.

        Raises
        ------
        ValueError
            If there is no such domain; the message lists the existing domains.
        """
        found = match_name(name, self.domains, self.aliases)
        if found is None:
            raise ValueError(
                f"unknown domain {name!r}; this data has: {', '.join(self.domains)}."
                f"{suggest(name, self.domains)}"
            )
        return found


def match_name(
    name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> str | None:
    """Return the entry of ``known`` that ``name`` spells, loosely or by an alias, or None."""
    names = list(known)
    if name in names:
        return name
    spellings = {_loose(alias): target for alias, target in (aliases or {}).items()}
    spellings |= {_loose(candidate): candidate for candidate in names}
    found = spellings.get(_loose(name))
    return found if found in names else None


def name_list(value: str | int | Sequence[str] | None) -> tuple[str, ...] | None:
    """Read a list of names, or one string of names separated by commas or ``+``."""
    if value is None:
        return None
    parts = re.split("[,+]", str(value)) if isinstance(value, str | int) else value
    names = tuple(str(part).strip() for part in parts if str(part).strip())
    if not names:
        raise ValueError(f"expected at least one name, got {value!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"a name occurs twice in {value!r}")
    return names


def concat(domains: Sequence[Domain]) -> Domain:
    """Join domains (or parts of domains) into one; its name is theirs joined by ``+``."""
    if not domains:
        raise ValueError("concat needs at least one domain")
    if len(domains) == 1:
        return domains[0]
    first = domains[0].inputs
    inputs: Inputs
    if isinstance(first, Tensor):
        inputs = torch.cat([_tensor(domain) for domain in domains])
    else:
        inputs = {key: torch.cat([_mapping(d)[key] for d in domains]) for key in first}
    names = dict.fromkeys(domain.name for domain in domains)
    return Domain("+".join(names), inputs, torch.cat([domain.targets for domain in domains]))


def batches(
    domain: Domain,
    spec: DataSpec,
    batch_size: int,
    *,
    generator: torch.Generator | None = None,
    device: str | torch.device = "cpu",
    drop_last: bool = False,
) -> Iterator[Batch]:
    """Yield ``(inputs, targets)`` batches of one pass over a domain, ready for a model.

    uint8 images become floats, ``(x/255 - mean) / std``, batch by batch; float images stay as they
    are. Token ids become int64, and columns on the right that are padding in the whole batch
    are cut off.

    Parameters
    ----------
    generator
        Shuffles the pass; without it the examples come in their stored order.
    device
        The device of the batches. uint8 images are moved before they are converted, which moves
        a quarter of the bytes.
    drop_last
        Skip a last batch that is not full.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    return _batches(domain, spec, batch_size, generator, torch.device(device), drop_last)


def _batches(
    domain: Domain,
    spec: DataSpec,
    batch_size: int,
    generator: torch.Generator | None,
    device: torch.device,
    drop_last: bool,
) -> Iterator[Batch]:
    size = len(domain)
    order = None
    if generator is not None:
        order = torch.randperm(size, generator=generator, device=generator.device).cpu()
    mean = torch.tensor(spec.mean or (0.0,), device=device).view(-1, 1, 1)
    std = torch.tensor(spec.std or (1.0,), device=device).view(-1, 1, 1)
    scale, shift = 1 / (255 * std), -mean / std
    end = size - size % batch_size if drop_last else size
    for start in range(0, end, batch_size):
        stop = min(start + batch_size, size)
        rows = slice(start, stop) if order is None else order[start:stop]
        inputs = _rows(domain.inputs, rows)
        if isinstance(inputs, Tensor):
            ready: Inputs = inputs.to(device)
            if inputs.dtype == torch.uint8:
                ready = inputs.to(device).float().mul_(scale).add_(shift)
        else:
            shown = _trim(inputs, spec.token_wise(inputs)).items()
            ready = {
                k: v.to(device, v.dtype if v.is_floating_point() else torch.long) for k, v in shown
            }
        yield ready, domain.targets[rows].to(device)


def _rows(inputs: Inputs, rows: Tensor | slice) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs[rows]
    return {key: tensor[rows] for key, tensor in inputs.items()}


def _trim(inputs: dict[str, Tensor], token_wise: set[str]) -> dict[str, Tensor]:
    """Cut off the columns behind the last token of the longest example."""
    if "attention_mask" not in token_wise:
        return inputs
    used = inputs["attention_mask"].any(dim=0).nonzero()
    width = int(used.max()) + 1 if len(used) else 1
    return {k: v[:, :width] if k in token_wise else v for k, v in inputs.items()}


def _tensor(domain: Domain) -> Tensor:
    if not isinstance(domain.inputs, Tensor):
        raise ValueError(f"domain {domain.name!r} holds text, the one before it images")
    return domain.inputs


def _mapping(domain: Domain) -> dict[str, Tensor]:
    if isinstance(domain.inputs, Tensor):
        raise ValueError(f"domain {domain.name!r} holds images, the one before it text")
    return domain.inputs


def _loose(name: str) -> str:
    return "".join(character for character in name.lower() if character not in " -_")
