"""Amazon Reviews encoded by a frozen transformer: one vector per review, made once and cached.

Training a head on these vectors equals training ``minilm`` with ``freeze=true``, without running
the encoder again in every epoch.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch

from hfedatm_core.data import amazon
from hfedatm_core.data.base import DataSpec, Domain, DomainData, Inputs
from hfedatm_core.data.cache import Array, cached_array, digest
from hfedatm_core.pretrained import MINILM_PACKAGE, from_hub, mean_pooled

DOMAINS = amazon.DOMAINS
CHUNK = 64


def load(
    data_dir: Path | str | None = None, *, encoder: str = MINILM_PACKAGE, max_length: int = 128
) -> DomainData:
    """Load the reviews and encode them.

    Parameters
    ----------
    data_dir
        A parquet or CSV file, or the folder with one whose name starts with ``amazon``.
    encoder
        The pretrained transformer: an installed package that contains it, a folder or a hub id.
    max_length
        Longer texts are cut to this number of tokens.
    """
    reviews = amazon.load(data_dir, tokenizer=encoder, max_length=max_length)
    domains = {
        name: Domain(name, _encode(encoder, domain.inputs), domain.targets)
        for name, domain in reviews.domains.items()
    }
    width = next(iter(domains.values())).inputs.shape[1]  # type: ignore[union-attr]
    spec = DataSpec("vector", len(amazon.CLASSES), (width,), amazon.CLASSES)
    return DomainData(spec, domains)


def _encode(encoder: str, inputs: Inputs) -> torch.Tensor:
    assert isinstance(inputs, dict)  # text
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    config = from_hub("AutoConfig", encoder)
    shape = (len(ids), config.hidden_size)

    @torch.no_grad()
    def fill(array: Array) -> None:
        network = from_hub("AutoModel", encoder, add_pooling_layer=False).eval()
        for start in range(0, len(ids), CHUNK):
            rows = slice(start, start + CHUNK)
            longest = int(mask[rows].sum(1).max())
            part = mean_pooled(network, ids[rows, :longest].long(), mask[rows, :longest].long())
            array[rows] = part.numpy()

    content = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    key = digest([encoder, config.to_json_string(), content, tuple(ids.shape)])
    features = cached_array("features-amazon", key, shape, np.float32, fill)
    return torch.from_numpy(np.asarray(features))
