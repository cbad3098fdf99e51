"""One exchange of refining: the layers that clients measure, and their answers as arrays.

The Gram of a layer travels as every Gram does. The Grams of a convolution in groups are small and
travel beside the layer's residual and moments (`hfedatm_core.apart.refining`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from hfedatm.base.records import (
    BadTask,
    grams_to_record,
    layers_to_record,
    need_record,
    record_to_layers,
    state_to_record,
)
from hfedatm.base.text import printable
from hfedatm_core import Answers, Gram
from hfedatm_core.grams.encoding import WireType
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.tensors import State

RECORD = "answers"
OWN = "own"
"""Record of the model that the owner's outputs come from, in the order of the merged model."""
RESIDUAL, MOMENTS, GROUPS = "residual", "moments", "groups"
MOST_GROUPED = 2**24
"""Most numbers in the Grams of a convolution in groups: as many as in a Gram of 4,096 features."""


@dataclass(frozen=True)
class AskedLayers:
    """The layers of one exchange.

    Attributes
    ----------
    widths
        Layer -> number of its inputs, with the constant input.
    groups
        Convolution in groups -> number of its groups.
    """

    widths: Mapping[str, int]
    groups: Mapping[str, int] = field(default_factory=dict)

    @property
    def plain(self) -> dict[str, int]:
        """The layers with one Gram, with their widths."""
        return {name: width for name, width in self.widths.items() if name not in self.groups}

    def to_records(self) -> dict[str, ConfigRecord]:
        """Return the wire form."""
        return {"layers": layers_to_record(self.widths), GROUPS: layers_to_record(self.groups)}

    @classmethod
    def of(cls, content: RecordDict, model: State) -> AskedLayers:
        """Read the wire form; raises `BadTask` for layers that the model does not have."""
        widths = record_to_layers(need_record(content, "layers", ConfigRecord))
        groups = record_to_layers(need_record(content, GROUPS, ConfigRecord))
        if not widths or not groups.keys() <= widths.keys():
            raise BadTask("layers: an exchange needs layers, and groups of these alone")
        for name, width in widths.items():
            weight = model.get(f"{name}.weight")
            if weight is None or weight.dim() < 2 or weight[0].numel() + 1 != width:
                raise BadTask(f"layers: the model has no {printable(name, 60)} of this width")
            number = groups.get(name, 1)
            if len(weight) % number or (number > 1 and number * width**2 > MOST_GROUPED):
                raise BadTask(f"layers: {printable(name, 60)} cannot have {number} groups")
        return cls(widths, groups)

    def template(self, model: State) -> State:
        """Return names, shapes and types of the arrays of an answer; all zero, without memory."""
        found: State = {}
        for name, width in self.widths.items():
            rows = len(model[f"{name}.weight"])
            found[f"{name}/{RESIDUAL}"] = torch.zeros(()).expand(rows, width)
            found[f"{name}/{MOMENTS}"] = torch.zeros((), dtype=torch.float64).expand(3, rows)
            if name in self.groups:
                blocks = torch.zeros(()).expand(self.groups[name], width, width)
                found[f"{name}/{GROUPS}"] = blocks
        return found


def answers_to_records(answers: Answers, dtype: WireType) -> dict[str, ArrayRecord]:
    """Return the wire form of a client's answers."""
    arrays: State = {}
    plain: dict[str, Gram] = {}
    for name, gram in answers.grams.items():
        arrays[f"{name}/{RESIDUAL}"] = answers.residuals[name].float()
        arrays[f"{name}/{MOMENTS}"] = answers.moments[name].double()
        if isinstance(gram, GroupedGram):
            arrays[f"{name}/{GROUPS}"] = gram.blocks.float()
        else:
            plain[name] = gram
    return to_records(arrays, plain, dtype)


def to_records(arrays: State, grams: Mapping[str, Gram], dtype: WireType) -> dict[str, ArrayRecord]:
    """Return the wire form of checked or averaged answers."""
    records = {RECORD: state_to_record(arrays)}
    return {**records, "grams": grams_to_record(grams, dtype)} if grams else records


def to_answers(asked: AskedLayers, arrays: State, grams: Mapping[str, Gram]) -> Answers:
    """Return answers from checked arrays and Grams."""
    found = dict(grams)
    for name in asked.groups:
        found[name] = GroupedGram(arrays[f"{name}/{GROUPS}"])
    return Answers(
        {name: found[name] for name in asked.widths},
        {name: arrays[f"{name}/{RESIDUAL}"] for name in asked.widths},
        {name: arrays[f"{name}/{MOMENTS}"] for name in asked.widths},
    )
