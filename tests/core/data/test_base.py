import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfedatm_core import data
from hfedatm_core.data.base import (
    DataSpec,
    Domain,
    DomainData,
    batches,
    concat,
    match_name,
    name_list,
)

IMAGES = DataSpec("image", 3, (2, 4, 4), mean=(0.25, 0.5), std=(0.5, 2.0))
TEXTS = DataSpec("text", 2, (6,), vocab_size=50, tokenizer="hash")


def image_domain(size=7, name="a"):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (size, 2, 4, 4), dtype=torch.uint8, generator=generator)
    return Domain(name, pixels, torch.arange(size))


def text_domain(lengths=(2, 5, 1)):
    mask = torch.zeros(len(lengths), 6, dtype=torch.int32)
    for row, length in zip(mask, lengths, strict=True):
        row[:length] = 1
    ids = torch.arange(len(lengths) * 6, dtype=torch.int32).view(-1, 6) * mask
    return Domain("t", {"input_ids": ids, "attention_mask": mask}, torch.zeros(len(lengths)).long())


def test_images_are_normalised_as_the_formula_says():
    domain = image_domain()
    (inputs, targets), *rest = batches(domain, IMAGES, 4)
    expected = domain.inputs[:4].double() / 255
    expected = (expected - torch.tensor([0.25, 0.5]).view(-1, 1, 1)) / torch.tensor(
        [0.5, 2.0]
    ).view(-1, 1, 1)
    torch.testing.assert_close(inputs.double(), expected, atol=1e-6, rtol=0)
    assert inputs.dtype == torch.float32
    assert targets.tolist() == [0, 1, 2, 3]
    assert [len(t) for _, t in rest] == [3]


def test_stored_images_are_not_changed_by_batching():
    domain = image_domain()
    before = domain.inputs.clone()
    for inputs, _ in batches(domain, IMAGES, 3):
        inputs.zero_()
    assert torch.equal(domain.inputs, before)


def test_float_images_stay_as_they_are():
    pixels = torch.randn(3, 2, 4, 4)
    ((inputs, _),) = batches(Domain("f", pixels, torch.zeros(3).long()), IMAGES, 3)
    assert torch.equal(inputs, pixels)


@settings(max_examples=50)
@given(size=st.integers(0, 40), batch_size=st.integers(1, 12), drop=st.booleans())
def test_a_shuffled_pass_sees_every_example_once(size, batch_size, drop):
    domain = image_domain(size)
    generator = torch.Generator().manual_seed(3)
    lengths, seen = [], []
    for inputs, targets in batches(domain, IMAGES, batch_size, generator=generator, drop_last=drop):
        assert len(inputs) == len(targets)
        lengths.append(len(targets))
        seen += targets.tolist()
        # Inputs and targets still belong together.
        ((straight, _),) = batches(domain.subset(targets), IMAGES, len(targets))
        assert torch.equal(inputs, straight)
    assert len(set(seen)) == len(seen) == (size - size % batch_size if drop else size)
    assert all(length == batch_size for length in lengths[: None if drop else -1])


def test_the_generator_decides_the_order():
    def order(seed):
        generator = torch.Generator().manual_seed(seed)
        passes = batches(image_domain(30), IMAGES, 8, generator=generator)
        return torch.cat([targets for _, targets in passes]).tolist()

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != sorted(order(0))


def test_text_batches_are_int64_and_cut_to_the_longest_text():
    (first, _), (second, _) = batches(text_domain(), TEXTS, 2)
    assert {key: tuple(value.shape) for key, value in first.items()} == {
        "input_ids": (2, 5),
        "attention_mask": (2, 5),
    }
    assert tuple(second["input_ids"].shape) == (1, 1)
    assert first["input_ids"].dtype == torch.long
    assert first["input_ids"][1].tolist() == [6, 7, 8, 9, 10]
    assert first["attention_mask"].sum(1).tolist() == [2, 5]


def test_batch_size_is_checked_before_the_first_batch():
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        batches(image_domain(), IMAGES, 0)


def test_subset_keeps_order_and_is_a_copy():
    domain = image_domain()
    part = domain.subset(torch.tensor([5, 0]))
    assert len(part) == 2 and part.targets.tolist() == [5, 0]
    part.inputs.zero_()
    assert domain.inputs[5].any()
    texts = text_domain().subset(torch.tensor([1]))
    assert texts.inputs["input_ids"].tolist() == [[6, 7, 8, 9, 10, 0]]


def test_concat_joins_and_names():
    joined = concat([image_domain(2, "a"), image_domain(3, "b"), image_domain(1, "a")])
    assert joined.name == "a+b" and len(joined) == 6
    assert joined.targets.tolist() == [0, 1, 0, 1, 2, 0]
    assert joined.inputs.dtype == torch.uint8
    texts = concat([text_domain(), text_domain()])
    assert texts.inputs["attention_mask"].sum().item() == 16


def test_concat_refuses_nothing_and_mixtures():
    with pytest.raises(ValueError, match="at least one domain"):
        concat([])
    with pytest.raises(ValueError, match="'t' holds text, the one before it images"):
        concat([image_domain(), text_domain()])
    with pytest.raises(ValueError, match="'a' holds images, the one before it text"):
        concat([text_domain(), image_domain()])


def test_a_domain_refuses_inputs_without_targets():
    with pytest.raises(ValueError, match="'x': inputs has 3 examples, targets has 2"):
        Domain("x", torch.zeros(3, 1), torch.zeros(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sound"}, "kind must be one of image, text, vector"),
        ({"num_classes": 1}, "at least 2"),
        ({"input_shape": (4, 4)}, "(channels, height, width)"),
        ({"class_names": ("a",)}, "1 class names were given for 3 classes"),
        ({"mean": (0.5,)}, "mean has 1 values for 2 channels"),
        ({"std": (0.0, 1.0)}, "std must be positive"),
        ({"kind": "text", "input_shape": (5,)}, "positive vocab_size"),
    ],
)
def test_a_contradictory_spec_is_refused(changes, message):
    given = {"kind": "image", "num_classes": 3, "input_shape": (2, 4, 4), **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        DataSpec(**given)


def test_examples_are_valid_and_always_the_same():
    assert IMAGES.example(3).shape == (3, 2, 4, 4)
    assert torch.equal(IMAGES.example(), IMAGES.example())
    texts = TEXTS.example(4)
    assert texts["input_ids"].shape == texts["attention_mask"].shape == (4, 6)
    assert 0 <= texts["input_ids"].min() and texts["input_ids"].max() < 50


def test_a_domain_is_found_loosely_and_a_wrong_one_is_explained():
    found = DomainData(
        IMAGES,
        {"Real World": image_domain(), "Art": image_domain()},
        {"R": "Real World", "gone": "Clipart"},
    )
    assert found.key("real_world") == found.key("RealWorld") == found.key("R") == "Real World"
    with pytest.raises(ValueError, match=r"'Atr'; this data has: Real World, Art\. Did you mean"):
        found.key("Atr")
    with pytest.raises(ValueError, match="unknown domain 'gone'"):
        found.key("gone")


def test_names_are_read_from_strings_and_lists():
    assert name_list(None) is None
    assert name_list("a, Real World+c") == ("a", "Real World", "c")
    assert name_list(["a", "b"]) == ("a", "b")
    assert name_list(15) == ("15",)
    with pytest.raises(ValueError, match="twice"):
        name_list("a,a")
    with pytest.raises(ValueError, match="at least one"):
        name_list(" , ")
    assert match_name("nothing", ["a"]) is None


def test_an_unknown_data_set_lists_what_there_is():
    with pytest.raises(ValueError) as caught:
        data.load("office-hom")
    message = str(caught.value)
    names = "amazon, amazon-features, digits, digits4, folder, office-home, pacs, terra-incognita"
    assert names in message and "Did you mean 'office-home'?" in message
    with pytest.raises(ValueError, match="unknown data set 'base'"):
        data.load("base")


def test_an_unknown_option_is_named():
    with pytest.raises(ValueError, match="'digits' has no option 'sise'.*Did you mean 'size'"):
        data.load("digits", sise=32)
