import pytest
import torch

from hfedatm_core import models
from hfedatm_core.data import DataSpec

TABLE = DataSpec("vector", 3, (5,))


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_hidden_layers(layers):
    model = models.build("mlp", TABLE, hidden=4, layers=layers)
    widths = [m.in_features for m in model if isinstance(m, torch.nn.Linear)]
    assert widths == [5] + [4] * layers
    assert model(TABLE.example()).shape == (2, 3)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="takes vector data, but the data set holds images"):
        models.build("mlp", DataSpec("image", 3, (1, 8, 8)))
    with pytest.raises(ValueError, match="hidden >= 1"):
        models.build("mlp", TABLE, hidden=0)
    with pytest.raises(ValueError, match=r"input_shape of vector data must be \(features,\)"):
        DataSpec("vector", 3, (1, 8, 8))
