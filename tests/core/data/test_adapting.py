"""Data sets of torch and Hugging Face become domains; what does not fit is named."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from hfedatm.base.building import BadData, load_data
from hfedatm.base.resolving import resolve
from hfedatm_core.data import DataSpec, Domain, DomainData
from hfedatm_core.data.adapting import NotADomain, as_domains, domain_of
from hfedatm_core.data_checks import check_domains
from hfedatm_core.tasks.regression import Regression

IMAGE = DataSpec("image", 3, (3, 4, 6))
TEXT = DataSpec("text", 2, (5,), vocab_size=50)
PIXELS = np.random.default_rng(0).integers(0, 256, (9, 4, 6, 3), dtype=np.uint8)
CLASSES = [0, 1, 2] * 3


class Columns:
    """What a data set of Hugging Face looks like from outside."""

    def __init__(self, **columns):
        self.columns = columns
        self.features = dict.fromkeys(columns)

    @property
    def column_names(self):
        return list(self.columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, row):
        return {name: values[row] for name, values in self.columns.items()}


class Pictures(Dataset):
    def __len__(self):
        return len(PIXELS)

    def __getitem__(self, row):
        return Image.fromarray(PIXELS[row]), CLASSES[row]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def columns(**more):
    pictures = [Image.fromarray(each) for each in PIXELS]
    return Columns(**{"image": pictures, "label": CLASSES, **more})


@pytest.mark.parametrize("make", [Pictures, columns, lambda: columns(name=["x"] * 9)])
def test_pictures_keep_their_bytes_with_channels_first(make):
    found = as_domains(DomainData(IMAGE, {"a": make()}))
    check_domains(found)
    expected = torch.from_numpy(PIXELS.transpose(0, 3, 1, 2).copy())
    assert torch.equal(found.domains["a"].inputs, expected)
    assert found.domains["a"].targets.tolist() == CLASSES


def test_tensors_and_subsets_of_torch():
    inputs, targets = torch.rand(9, 3, 4, 6), torch.tensor(CLASSES)
    whole = Subset(TensorDataset(inputs, targets), [1, 3, 5])
    found = domain_of("a", whole, IMAGE)
    assert torch.equal(found.inputs, inputs[[1, 3, 5]])
    assert torch.equal(found.targets, targets[[1, 3, 5]])


def test_tokenised_text_has_its_columns():
    ids = [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    mask = [[1] * 5, [1, 1, 1, 0, 0]]
    found = as_domains(
        DomainData(TEXT, {"a": Columns(input_ids=ids, attention_mask=mask, labels=[0, 1])})
    )
    check_domains(found)
    assert found.domains["a"].inputs["input_ids"].tolist() == ids
    assert found.domains["a"].inputs["attention_mask"].tolist() == mask


def test_rows_of_numbers_with_numbers_as_targets():
    spec = DataSpec("vector", outputs=1, input_shape=(2,))
    data = Columns(x=[[0.5, 1.0], [1.5, 2.0]], price=[[3.0], [4.0]])
    found = domain_of("a", data, spec, targets="price")
    assert found.inputs.dtype == found.targets.dtype == torch.float32
    check_domains(DomainData(spec, {"a": found}), Regression(spec))


def test_a_domain_stays_as_it_is():
    domain = Domain("a", torch.rand(3, 3, 4, 6), torch.arange(3))
    data = DomainData(IMAGE, {"a": domain})
    assert as_domains(data) is data
    mixed = as_domains(DomainData(IMAGE, {"a": domain, "b": Pictures()}))
    assert mixed.domains["a"] is domain and len(mixed.domains["b"]) == 9


@pytest.mark.parametrize(
    "data, spec, says",
    [
        (Stream(), IMAGE, "has no length"),
        (Columns(image=[], label=[]), IMAGE, "no examples"),
        (columns(), TEXT, "text must be tokenised"),
        (Columns(photo=[0], label=[0]), IMAGE, "it has the columns photo, label; say which"),
        (Columns(image=[0], species=[0]), IMAGE, "targets not found"),
        (TensorDataset(torch.rand(3, 3, 4, 6)), IMAGE, "a tuple; needed is a pair"),
        (columns(label=["cat"] * 9), IMAGE, "number the classes from 0"),
        (Columns(x=[[1.0], [1.0, 2.0]], y=[0, 1]), DataSpec("vector", 2, (1,)), "several shapes"),
    ],
)
def test_what_is_not_understood_is_named(data, spec, says):
    with pytest.raises(NotADomain) as found:
        domain_of("a", data, spec)
    assert says in str(found.value)


def loaded(data_dir=None):
    return DomainData(IMAGE, {"a": Pictures(), "b": columns()})


def broken(data_dir=None):
    return DomainData(IMAGE, {"a": Pictures(), "clinic": Columns(photo=[0], label=[0])})


def test_a_users_function_may_return_data_sets():
    data = load_data(resolve({"dataset": "test_adapting:loaded", "target-domain": "b"}))
    assert all(isinstance(domain, Domain) for domain in data.domains.values())


def test_what_others_are_told_does_not_name_the_domain():
    with pytest.raises(BadData) as found:
        load_data(resolve({"dataset": "test_adapting:broken"}))
    assert "'clinic'" in str(found.value) and "clinic" not in found.value.fault


def test_hugging_faces_own_data_sets_are_recognised():
    datasets = pytest.importorskip("datasets")
    rows = {"x": [[0.5, 1.0], [1.5, 2.0]], "label": [0, 1]}
    spec = DataSpec("vector", 2, (2,))
    found = as_domains(DomainData(spec, {"a": datasets.Dataset.from_dict(rows)}))
    assert found.domains["a"].targets.tolist() == [0, 1]
