"""Images in a folder become what a network takes."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hfedatm_core.batch_norm import measure_again
from hfedatm_core.checkpoints import ImageBatches, Network, as_batches


def folder(tmp_path, count=5, side=20):
    draw = np.random.default_rng(0)
    (tmp_path / "some" / "where").mkdir(parents=True)
    for number in range(count):
        pixels = draw.integers(0, 255, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "some" / "where" / f"{number}.png")
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


def test_images_are_scaled_and_normalised(tmp_path):
    network = Network(nn.Identity(), torch.zeros(1, 3, 8, 8), (0.5,) * 3, (0.25,) * 3)
    batches = list(ImageBatches(folder(tmp_path), network, size=2))
    assert [len(images) for images, _ in batches] == [2, 2, 1]
    images = torch.cat([images for images, _ in batches])
    assert images.shape == (5, 3, 8, 8) and -2 <= images.min() < 0 < images.max() <= 2


def test_grey_and_named_inputs(tmp_path):
    network = Network(nn.Identity(), {"pixel_values": torch.zeros(1, 1, 6, 6)})
    [(inputs, _)] = ImageBatches(folder(tmp_path), network)
    assert inputs["pixel_values"].shape == (5, 1, 6, 6)
    assert 0 <= inputs["pixel_values"].min() <= inputs["pixel_values"].max() <= 1


def test_a_folder_without_images_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no images"):
        ImageBatches(tmp_path, Network(nn.Identity(), torch.zeros(1, 3, 8, 8)))


def test_inputs_come_alone_or_with_targets():
    x = torch.zeros(2)
    assert [inputs is x for inputs, _ in as_batches([x, (x, 1), [x, 2]])] == [True] * 3


def test_batch_norm_is_measured_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.BatchNorm1d(3)).train()
    model[0].running_mean += 100
    data = 4 + 2 * torch.randn(400, 3)
    used = measure_again(model, [(part, None) for part in (*data.split(100), data[:1])])
    assert used == 4
    torch.testing.assert_close(model[0].running_mean, data.mean(0))
    torch.testing.assert_close(model[0].running_var, data.var(0), rtol=0.05, atol=0)
    # Dropout is off, so what the second one sees is standardised.
    torch.testing.assert_close(model[2].running_var, torch.ones(3), rtol=0.05, atol=0)
    assert model.training and model[1].training and model[0].momentum == 0.1


def test_one_example_is_too_few_to_measure_batch_norm():
    with pytest.raises(ValueError, match="two examples"):
        measure_again(nn.BatchNorm1d(2), [(torch.zeros(1, 2), None)])
