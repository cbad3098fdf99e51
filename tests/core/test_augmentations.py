"""Changes to training batches: they move pictures, never their values, and repeat with a seed."""

import pytest
import torch

from hfedatm_core.augmentations import crop, flip, noise


def seeded(number=0):
    return torch.Generator().manual_seed(number)


PICTURES = torch.rand(40, 2, 16, 24, generator=seeded())
MASKS = (PICTURES[:, 0] * 1000).long()


@pytest.mark.parametrize("change", [flip, crop])
def test_a_target_for_each_pixel_moves_with_its_image(change):
    pictures, masks = change.augment(PICTURES, MASKS, seeded(1))
    assert pictures.shape == PICTURES.shape and not torch.equal(pictures, PICTURES)
    assert torch.equal((pictures[:, 0] * 1000).long(), masks)


@pytest.mark.parametrize("change", [flip, crop, noise])
def test_the_generator_alone_decides_and_classes_stay(change):
    classes = torch.arange(40)
    first, same = (change.augment(PICTURES, classes, seeded(2)) for _ in range(2))
    assert torch.equal(first[0], same[0]) and torch.equal(first[1], classes)
    assert not torch.equal(first[0], change.augment(PICTURES, classes, seeded(3))[0])


def test_about_half_of_the_images_are_mirrored():
    changed, _ = flip.augment(PICTURES, MASKS, seeded(4))
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(changed, PICTURES, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(changed, PICTURES, strict=True)]
    assert sum(mirrored) + sum(kept) == 40 and 10 < sum(mirrored) < 30


def test_a_crop_moves_by_at_most_an_eighth():
    ramp = torch.arange(16.0).view(1, 1, 16, 1).expand(200, 1, 16, 24)
    changed, _ = crop.augment(ramp, torch.zeros(200), seeded(5))
    moved = (changed - ramp)[:, 0, 4:12].flatten(1)
    assert torch.equal(moved.min(1).values, moved.max(1).values)
    assert set(moved[:, 0].tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}


@pytest.mark.parametrize("change", [flip, crop])
def test_vectors_are_no_images(change):
    with pytest.raises(ValueError, match="is for images"):
        change.augment(torch.rand(4, 7), torch.zeros(4), seeded())
