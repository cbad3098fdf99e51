import numpy as np
import pytest
import torch

from hfedatm_core.data import load


def write(folder, name, shape, labels=None, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, count in (("train", 4), ("test", 2)):
        arrays[f"x_{part}"] = np.full((count, *shape), 50 if part == "train" else 200, np.uint8)
        arrays[f"y_{part}"] = np.arange(count) if labels is None else np.full(count, labels)
    np.savez(folder / f"digits_{name}.npz", **{**arrays, **changes})


def test_gray_and_colour_of_any_size_become_rgb(tmp_path):
    write(tmp_path / "digits4", "usps", (16, 16))
    write(tmp_path / "digits4", "mnistm", (32, 32, 3))
    data = load("digits4", tmp_path, size=24)
    assert list(data.domains) == ["mnistm", "usps"]
    for domain in data.domains.values():
        assert domain.inputs.shape == (6, 3, 24, 24) and domain.inputs.dtype == torch.uint8
        assert domain.inputs[0].unique().tolist() == [50]
        assert domain.inputs[5].unique().tolist() == [200]
        assert domain.targets.tolist() == [0, 1, 2, 3, 0, 1]
    assert list(load("digits4", tmp_path / "digits4", domains="usps").domains) == ["usps"]


def test_errors_name_the_file_and_the_cure(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Put it: .*digits4/digits_<domain>\.npz"):
        load("digits4", tmp_path)
    write(tmp_path, "usps", (16, 16))
    with pytest.raises(ValueError, match="'mnist' is not there; found: usps"):
        load("digits4", tmp_path, domains="mnist")
    write(tmp_path, "usps", (16, 16), labels=11)
    with pytest.raises(ValueError, match="digits_usps.npz: labels must be 0..9"):
        load("digits4", tmp_path)
    write(tmp_path, "usps", (16, 16), x_train=np.zeros((4, 16, 16)))
    with pytest.raises(ValueError, match="images must be uint8"):
        load("digits4", tmp_path)
    (tmp_path / "digits_usps.npz").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot read .*digits_usps.npz"):
        load("digits4", tmp_path)


@pytest.mark.data
def test_the_real_digits(digits4_data):
    data = load("digits4", digits4_data)
    counts = {name: len(domain) for name, domain in data.domains.items()}
    assert counts == {"mnist": 5000, "mnistm": 5000, "usps": 9298, "optdigits": 1797}
    for domain in data.domains.values():
        assert domain.inputs.shape[1:] == (3, 32, 32)
        assert sorted(domain.targets.unique().tolist()) == list(range(10))
    gray, colour = data.domains["mnist"].inputs, data.domains["mnistm"].inputs
    assert torch.equal(gray[:, 0], gray[:, 2]) and not torch.equal(colour[:, 0], colour[:, 2])
