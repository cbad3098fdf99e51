"""Examples that no model can be trained on are refused: one message, which says what to do."""

import math

import pytest
import torch
from torch.utils.data import TensorDataset

from hfedatm_core.data import DataSpec, Domain, DomainData
from hfedatm_core.data_checks import BadDomain, check_domains

IMAGE = DataSpec("image", 3, (1, 4, 4))
TEXT = DataSpec("text", 2, (6,), vocab_size=10)


def domain(inputs=None, targets=None):
    inputs = torch.rand(6, 1, 4, 4) if inputs is None else inputs
    return Domain("clinic", inputs, torch.arange(6) % 3 if targets is None else targets)


def refused(*domains, spec=IMAGE):
    with pytest.raises(BadDomain) as found:
        check_domains(DomainData(spec, {f"d{n}": each for n, each in enumerate(domains)}))
    return found.value


def nan_in(example):
    inputs = torch.rand(6, 1, 4, 4)
    inputs[example, 0, 1, 2] = math.nan
    return inputs


@pytest.mark.parametrize(
    "bad, says",
    [
        (domain(targets=torch.arange(6.0)), "targets is a tensor of torch.float32"),
        (domain(targets=torch.arange(6).int()), "targets.long()"),
        (domain(targets=torch.zeros(6, 1).long()), "one class number per example"),
        (
            domain(targets=torch.arange(6)),
            "a target is not a class: with num_classes = 3 targets are 0",
        ),
        (domain(targets=-(torch.arange(6) % 3)), "a target is not a class"),
        (domain(targets=[0] * 6), "targets is of type list, not a Tensor: torch.as_tensor"),
        (domain(torch.rand(6, 1, 4, 5)), "the shape (1, 4, 5), and input_shape of the DataSpec"),
        (domain(torch.rand(6, 4, 4)), "the shape (4, 4)"),
        (domain(nan_in(4)), "an input is NaN or infinite"),
        (domain(nan_in(4) * math.inf), "an input is NaN or infinite"),
        (domain(torch.rand(6, 1, 4, 4).double()), "it must be of torch.float32, or torch.uint8"),
        (domain(torch.zeros(6, 1, 4, 4).long()), "inputs is of torch.int64"),
        (domain(torch.rand(6, 1, 4, 4).numpy()), "inputs is of type ndarray, not a Tensor: torch."),
        (domain(torch.rand(0, 1, 4, 4), torch.arange(0)), "no examples"),
        (domain(TensorDataset(torch.rand(6, 1, 4, 4))), "a torch Dataset (TensorDataset)"),
        (TensorDataset(torch.rand(6, 1, 4, 4)), "torch.stack([x for x, _ in dataset])"),
    ],
)
def test_what_a_domain_must_not_hold_is_named(bad, says):
    assert says in str(refused(domain(), bad))


@pytest.mark.parametrize(
    "inputs, says",
    [
        (torch.zeros(6, 6).long(), "text is a dict with 'input_ids' and 'attention_mask'"),
        ({"attention_mask": torch.ones(6, 6).long()}, "text is a dict with 'input_ids'"),
        ({"input_ids": torch.full((6, 6), 10)}, "a token is not in the vocabulary"),
        ({"input_ids": torch.full((6, 6), -1)}, "a token is not in the vocabulary"),
        ({"input_ids": torch.zeros(6, 6)}, "input_ids must be a tensor of integers"),
        ({"input_ids": torch.zeros(6, 7).long()}, "7 tokens per example"),
    ],
)
def test_text_is_tokens_of_the_vocabulary(inputs, says):
    assert says in str(refused(Domain("d", inputs, torch.arange(6) % 2), spec=TEXT))


def test_what_others_are_told_names_neither_the_domain_nor_what_it_holds():
    error = refused(domain(nan_in(4)))
    assert "clinic" in str(error) and "example 4" in str(error)
    assert "clinic" not in error.fault and "4" not in error.fault
    error = refused(domain(targets=torch.arange(6) + 17))
    assert "from 17 to 22" in str(error) and "17" not in error.fault and "22" not in error.fault


def test_a_nan_is_found_wherever_it_is(monkeypatch):
    monkeypatch.setattr("hfedatm_core.data_checks._CHUNK", 32)  # two examples
    for example in range(6):
        assert f"example {example}" in str(refused(domain(nan_in(example))))


def test_good_data_pass():
    check_domains(DomainData(IMAGE, {"a": domain(), "b": domain(torch.zeros(6, 1, 4, 4).byte())}))
    tokens = {"input_ids": torch.randint(10, (6, 5)), "attention_mask": torch.ones(6, 5).int()}
    check_domains(DomainData(TEXT, {"a": Domain("a", tokens, torch.arange(6) % 2)}))
    vector = Domain("a", torch.rand(6, 7), torch.arange(6) % 2)
    check_domains(DomainData(DataSpec("vector", 2, (7,)), {"a": vector}))
