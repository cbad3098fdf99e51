import pytest
import torch
from sklearn.datasets import load_digits

from hfedatm_core.data import load
from hfedatm_core.data.digits import ANGLES, DOMAINS, _rotate, _table


def centre_of_mass(images):
    """Mean row and column of the brightness, from the centre, in units of the image size."""
    weights = images[:, 0].double()
    axis = torch.arange(weights.shape[-1]).double() + 0.5
    total = weights.sum((1, 2))
    rows = (weights.sum(2) * axis).sum(1) / total / len(axis) - 0.5
    columns = (weights.sum(1) * axis).sum(1) / total / len(axis) - 0.5
    return rows, columns


def test_the_six_domains_share_out_all_images_evenly_by_class():
    data = load("digits")
    assert tuple(data.domains) == DOMAINS == ("0", "15", "30", "45", "60", "75")
    assert sorted(len(d) for d in data.domains.values()) == [299, 299, 299, 300, 300, 300]
    counts = torch.stack([d.targets.bincount(minlength=10) for d in data.domains.values()])
    assert torch.equal(counts.sum(0), torch.tensor(load_digits().target).bincount())
    assert (counts.max(0).values - counts.min(0).values).max() <= 1
    assert data.spec.input_shape == (1, 32, 32)
    assert all(d.inputs.dtype == torch.uint8 for d in data.domains.values())


def test_disjoint_domains_have_no_image_in_common():
    everything, own = load("digits", images="all"), load("digits")
    rows = []
    for name in DOMAINS:
        # Every image of the disjoint domain is found, once, among all images at that angle.
        every = everything.domains[name].inputs.flatten(1)
        mine = own.domains[name].inputs.flatten(1)
        same = (mine[:, None, ::11] == every[None, :, ::11]).all(2)
        rows += same.nonzero()[:, 1].tolist()
        assert same.any(1).all()
    assert sorted(set(rows)) == list(range(1797))
    assert len(rows) == 1797


def test_all_images_at_every_angle_on_request():
    data = load("digits", images="all")
    assert [len(domain) for domain in data.domains.values()] == [1797] * 6
    first = data.domains["0"]
    assert all(torch.equal(first.targets, d.targets) for d in data.domains.values())


@pytest.mark.parametrize("angle", ANGLES)
def test_rotation_is_counter_clockwise_by_the_angle(angle):
    spot = torch.zeros(1, 1, 8, 8)
    spot[0, 0, 3:5, 6] = 1  # right of the centre
    rows, columns = centre_of_mass(_rotate(spot, angle, 64))
    measured = torch.rad2deg(torch.atan2(-rows, columns)).item()  # rows count downwards
    assert measured == pytest.approx(angle, abs=1)


def test_nothing_is_cut_off():
    data = load("digits", images="all")
    brightness = [d.inputs.double().mean().item() for d in data.domains.values()]
    assert min(brightness) > 0.99 * max(brightness)


def test_loading_is_deterministic():
    first, second = load("digits", size=16), load("digits", size=16)
    for name in DOMAINS:
        assert torch.equal(first.domains[name].inputs, second.domains[name].inputs)
        assert torch.equal(first.domains[name].targets, second.domains[name].targets)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="'disjoint' or 'all', not 'some'"):
        load("digits", images="some")
    with pytest.raises(ValueError, match="at least 8 pixels"):
        load("digits", size=4)


def test_the_images_are_those_that_scikit_learn_loads():
    pixels, labels = load_digits(return_X_y=True)
    assert _table()[:, :-1].tolist() == pixels.tolist()
    assert _table()[:, -1].tolist() == labels.tolist()
