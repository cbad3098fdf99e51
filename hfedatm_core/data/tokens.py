"""From texts to token ids: a tokenizer of transformers, or a built-in one that hashes words."""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hfedatm_core.data.cache import Array, file_signature
from hfedatm_core.pretrained import from_hub, local_folder


class Tokenizer(Protocol):
    """A tokenizer, which turns texts into ids."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""
        ...

    @property
    def signature(self) -> str:
        """A text that differs for tokenizers that give different ids."""
        ...

    def encode(self, texts: Sequence[str], max_length: int) -> Array:
        """Return an integer array ``texts x 2 x max_length``: the ids and the attention mask."""
        ...


@dataclass(frozen=True)
class HashTokenizer:
    """Lower-case words, each mapped to ``2 + crc32(word) mod (vocab_size - 2)``.

    Id 0 is padding, id 1 starts every text. The tokenizer needs no files and knows no language: it
    is for tests and small models that learn their own embedding, not for pretrained models.
    """

    vocab_size: int = 8192

    def __post_init__(self) -> None:
        """Refuse a vocabulary without room for words."""
        if self.vocab_size < 3:
            raise ValueError(f"vocab_size must be at least 3, not {self.vocab_size}")

    @property
    def signature(self) -> str:
        """The scheme and the vocabulary size, which determine the ids."""
        return f"hash-1:{self.vocab_size}"

    def encode(self, texts: Sequence[str], max_length: int) -> Array:
        """Return an integer array ``texts x 2 x max_length``: the ids and the attention mask."""
        result = np.zeros((len(texts), 2, max_length), dtype=np.int32)
        for row, text in zip(result, texts, strict=True):
            words = re.findall(r"\w+|[!?]", text.lower())[: max_length - 1]
            row[0, 0] = 1
            row[0, 1 : len(words) + 1] = [
                2 + zlib.crc32(word.encode()) % (self.vocab_size - 2) for word in words
            ]
            row[1, : len(words) + 1] = 1
        return result


class PretrainedTokenizer:
    """A tokenizer of transformers from a folder, an installed package, or the Hugging Face hub."""

    def __init__(self, source: str) -> None:
        folder = local_folder(source)
        self._tokenizer: Any = from_hub("AutoTokenizer", source)
        self._tokenizer.padding_side = "right"
        self.vocab_size = len(self._tokenizer)
        files = sorted(folder.glob("*token*")) + sorted(folder.glob("vocab*")) if folder else []
        stamps = [f"{path.name}:{file_signature(path)}" for path in files if path.is_file()]
        self.signature = "|".join([Path(source).name, *stamps])

    def encode(self, texts: Sequence[str], max_length: int) -> Array:
        """Return an integer array ``texts x 2 x max_length``: the ids and the attention mask."""
        encoded = self._tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=max_length,
            return_tensors="np",
        )
        pair = [encoded["input_ids"], encoded["attention_mask"]]
        return np.stack(pair, axis=1).astype(np.int32)


def find_tokenizer(name: str, vocab_size: int | None = None) -> Tokenizer:
    """Return the tokenizer of this name: ``"hash"``, a folder, a package, or a hub id."""
    if name == "hash":
        return HashTokenizer() if vocab_size is None else HashTokenizer(vocab_size)
    if vocab_size is not None:
        raise ValueError(f"vocab_size is for the hash tokenizer only; {name!r} has its own")
    return PretrainedTokenizer(name)
