"""Functions that all models share."""

from torch import nn

from hfedatm_core.data.base import DataSpec


def head_name(model: nn.Module) -> str:
    """Return the dotted name of the classifier: the last Linear layer in module order."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear, so it has no classifier; end the model with "
            "a Linear layer"
        )
    return str(names[-1])


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, trained or not."""
    return sum(parameter.numel() for parameter in model.parameters())


def require_kind(spec: DataSpec, kind: str, model: str) -> None:
    """Refuse data of another kind, such as images for a text model."""
    if spec.kind != kind:
        raise ValueError(f"model {model!r} takes {kind} data, but the data set holds {spec.kind}s")


def scaled(size: int, width: float) -> int:
    """Return a number of channels times a model's ``width``, at least 1."""
    if not 0 < width <= 64:
        raise ValueError(f"width must lie in (0, 64], not {width:g}")
    return max(1, round(size * width))
