"""The attack works on bare Grams of few rows, and noise stops it: the canary of the protection."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from hfedatm_core.grams.gram import Gram
from hfedatm_core.privacy.accounting import Budget, calibrate_sigma
from hfedatm_core.privacy.audit import audit, eigenfactor, match_rows
from hfedatm_core.privacy.mechanisms import find_mechanism
from hfedatm_core.privacy.noise import NoiseSource
from hfedatm_core.privacy.psd import repair
from hfedatm_core.privacy.release import GramRelease

ROWS = 8


@pytest.fixture(scope="module")
def activations() -> dict[str, torch.Tensor]:
    """Inputs of the three Linear layers of a LeNet-5 trained on real digits."""
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    images = nn.functional.interpolate(images, size=(32, 32), mode="bilinear")
    targets = torch.tensor(labels)
    convolutions = nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    fc1 = nn.Sequential(nn.Linear(400, 120), nn.ReLU())
    fc2 = nn.Sequential(nn.Linear(120, 84), nn.ReLU())
    network = nn.Sequential(convolutions, fc1, fc2, nn.Linear(84, 10))
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    for batch in torch.cat([torch.randperm(len(images)) for _ in range(4)]).split(64):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(images[batch]), targets[batch]).backward()
        optimiser.step()
    with torch.no_grad():
        first = convolutions(images[:64])
        second = fc1(first)
        return {"fc1": first, "fc2": second, "fc3": fc2(second)}


def gram_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.T @ rows / len(rows)


@pytest.mark.parametrize("layer", ["fc1", "fc2", "fc3"])
def test_most_rows_are_recovered_without_dp(activations, layer):
    recovered = trivial = 0
    for rows in activations[layer][: 2 * ROWS].double().split(ROWS):
        result = audit(gram_of(rows), ROWS, rows)
        assert result.attacked
        recovered += result.recovered
        trivial += result.without_search
        # What is found is the activation itself, in scale too: two vectors of one length with a
        # cosine above 0.99 are less than sqrt(2 - 2 * 0.99) of it apart.
        best = max(range(ROWS), key=lambda i: result.cosines[i])
        error = (result.reconstruction[best] - rows[best]).norm() / rows[best].norm()
        assert float(error) < 0.1415
    assert recovered > ROWS
    assert trivial == 0


@pytest.mark.parametrize("layer", ["fc1", "fc2", "fc3"])
@pytest.mark.parametrize("mechanism", ["example", "client"])
def test_nothing_is_recovered_with_epsilon_one(activations, layer, mechanism):
    rows = activations[layer][:ROWS].double()
    sigma = calibrate_sigma(Budget(1.0, 1e-5), releases=3)
    # the clip that keeps every row as it is: the least noise an honest user could choose
    if mechanism == "example":
        bound = float(rows.norm(dim=1).max())
    else:
        bound = float(torch.linalg.matrix_norm(gram_of(rows)))
    gram = Gram.from_dense(gram_of(rows), ROWS)
    for seed in range(3):
        noise = NoiseSource(seed, f"{layer}/{mechanism}")
        release = GramRelease(find_mechanism(mechanism)(bound), sigma)
        sent = release.privatise({layer: gram}, ROWS, noise)[layer]
        result = audit(repair(sent).dense(), ROWS, rows, iterations=200)
        assert result.recovered == 0, result.summary()


def test_signed_inputs_are_not_attacked():
    rows = torch.randn(ROWS, 30, generator=torch.Generator().manual_seed(0))
    result = audit(gram_of(rows), ROWS, rows)
    assert not result.attacked
    assert "freedom of rotation remains" in result.summary()


def test_the_truth_is_not_needed_to_attack(activations):
    rows = activations["fc2"][:4].double()
    blind = audit(gram_of(rows), 4)
    assert blind.recovered is None
    assert blind.violation < 1e-6
    _, cosines = match_rows(blind.reconstruction, rows)
    assert (cosines > 0.99).all()
    assert "4 rows reconstructed" in blind.summary()


def test_more_rows_than_features():
    rows = torch.rand(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factor = eigenfactor(gram_of(rows), 9)
    assert factor.shape == (9, 4)
    assert torch.allclose(factor.T @ factor, gram_of(rows))
    assert audit(gram_of(rows), 9, rows).of == 9


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="square"):
        audit(torch.ones(2, 3), 2)
    with pytest.raises(ValueError, match="at least one row"):
        audit(torch.eye(3), 0)
    with pytest.raises(ValueError, match=r"shape \(2, 2\), expected \(2, 3\)"):
        audit(torch.eye(3), 2, torch.ones(2, 2))
    with pytest.raises(ValueError, match="no positive eigenvalue"):
        audit(torch.zeros(3, 3), 2)
    with pytest.raises(ValueError, match="NaN"):
        audit(torch.full((2, 2), float("nan")), 1)
