"""What leaves a client: noised with the stated spread, never a Gram that cannot be noised."""

import pytest
import torch

from hfedatm_core import FactorGram, Gram, collect_grams
from hfedatm_core.privacy.accounting import Ledger
from hfedatm_core.privacy.clipping import clip_frobenius, clip_spectral
from hfedatm_core.privacy.mechanisms import find_mechanism
from hfedatm_core.privacy.noise import NoiseSource
from hfedatm_core.privacy.psd import nearest_psd, repair
from hfedatm_core.privacy.release import GramNotReleasableError, GramRelease

EXAMPLES, DIM = 40, 120


def release_of(mechanism: str, clip: float, sigma: float, rank: int = 0, **more) -> GramRelease:
    options = {"rank": rank} if rank else {}
    return GramRelease(find_mechanism(mechanism)(clip, **options), sigma, **more)


def gram_of(rows: torch.Tensor) -> Gram:
    return Gram.from_dense(rows.T @ rows / len(rows), len(rows))


@pytest.fixture
def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(EXAMPLES, DIM, generator=generator, dtype=torch.float64)
    return 2 * torch.nn.functional.normalize(rows)


def expected(mechanism: str, gram: Gram) -> torch.Tensor:
    if mechanism == "example":
        return gram.dense()
    clip = clip_frobenius if mechanism == "client" else clip_spectral
    return clip(gram.dense(), 2.0)


@pytest.mark.parametrize(
    ("mechanism", "std"),
    [("example", 3 * 4 / EXAMPLES), ("client", 3 * 2), ("paper", 3 * 2 * DIM**0.5)],
)
def test_the_noise_is_symmetric_with_the_right_spread(rows, mechanism, std):
    gram = gram_of(rows)
    release = release_of(mechanism, clip=2.0, sigma=3.0)
    sent = release.privatise({"fc": gram}, EXAMPLES, NoiseSource(1))["fc"].dense()
    assert torch.equal(sent, sent.T)
    noise = sent - expected(mechanism, gram)
    upper = noise[torch.triu_indices(DIM, DIM).unbind()]
    assert float(upper.std()) == pytest.approx(std, rel=5 / (2 * upper.numel()) ** 0.5)
    diagonal = noise.diagonal()  # as noisy as the rest
    assert float(diagonal.std()) == pytest.approx(std, rel=5 / (2 * DIM) ** 0.5)


def test_every_gram_is_noised_and_paid_for_once(rows):
    shared = gram_of(rows)
    grams = {"q": shared, "k": shared, "out": gram_of(rows)}
    release = release_of("example", clip=2.0, sigma=1.5)
    sent = release.privatise(grams, EXAMPLES, NoiseSource())
    assert list(sent) == ["q", "k", "out"]
    # two noised copies of one Gram would be two releases
    assert sent["q"] is sent["k"]
    assert not torch.equal(sent["q"].dense(), sent["out"].dense())
    assert release.cost(grams) == Ledger().spend_gaussian(1.5, 2)


def test_text_does_not_tell_its_length():
    tokens = torch.rand(6, 9, 4, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2).double())
    grams = collect_grams(model, [(tokens, None)], clip=1.0)
    assert grams["0"].rows == 54
    sent = release_of("example", clip=1.0, sigma=1e-9).privatise(grams, 6, NoiseSource())["0"]
    assert sent.rows == 6
    clipped = (tokens / tokens.flatten(1).norm(dim=1).view(6, 1, 1)).reshape(-1, 4)
    assert torch.allclose(sent.dense(), clipped.T @ clipped / 6, atol=1e-6)


def test_shared_out_noise_is_smaller(rows):
    alone = release_of("example", clip=2.0, sigma=3.0)
    shared = release_of("example", clip=2.0, sigma=3.0, honest_survivors=16)
    assert shared.noise_std(DIM) == alone.noise_std(DIM) / 4
    assert release_of("paper", 2.0, 3.0, rank=4).noise_std(DIM) == 12.0
    replace = release_of("client", 2.0, 3.0, adjacency="replace")
    assert replace.noise_std(DIM) == pytest.approx(6.0 * 2**0.5)


def test_wide_layers_in_factor_form_are_refused_by_name(rows):
    factor = FactorGram(rows[:8], rows=EXAMPLES)
    release = release_of("client", clip=2.0, sigma=1.0)
    with pytest.raises(GramNotReleasableError, match=r"'classifier.0'.*Raise gram-max-dim to 120"):
        release.privatise({"classifier.0": factor}, EXAMPLES, NoiseSource())


def test_unclipped_and_broken_grams_are_refused(rows):
    release = release_of("example", clip=1.0, sigma=1.0)
    with pytest.raises(GramNotReleasableError, match="'fc' was not collected with clip=1"):
        release.privatise({"fc": gram_of(rows)}, EXAMPLES, NoiseSource())
    rows[0, 0] = float("nan")
    with pytest.raises(GramNotReleasableError, match="'fc' holds NaN"):
        release.privatise({"fc": gram_of(rows)}, EXAMPLES, NoiseSource())
    with pytest.raises(GramNotReleasableError, match="at least one example"):
        release.privatise({"fc": gram_of(rows)}, 0, NoiseSource())


def test_repair_gives_the_nearest_psd_matrix(rows):
    sent = release_of("example", 2.0, 5.0).privatise(
        {"fc": gram_of(rows)}, EXAMPLES, NoiseSource(3)
    )
    noised = sent["fc"].dense()
    values = torch.linalg.eigvalsh(noised)
    assert values[0] < 0
    repaired = repair(sent["fc"])
    assert repaired.rows == EXAMPLES
    assert float(torch.linalg.eigvalsh(repaired.dense())[0]) > -1e-9
    # nothing PSD is closer than the norm of the negative part
    gap = torch.linalg.matrix_norm(repaired.dense() - noised)
    assert float(gap) == pytest.approx(float(values.clamp_max(0).norm()), rel=1e-6)


def test_repair_leaves_psd_matrices_alone(rows):
    matrix = rows.T @ rows + torch.eye(DIM, dtype=torch.float64)
    assert torch.equal(nearest_psd(matrix), matrix)
    factor = FactorGram(rows[:8])
    assert repair(factor) is factor
    with pytest.raises(ValueError, match="square"):
        nearest_psd(rows)
    with pytest.raises(ValueError, match="NaN"):
        nearest_psd(matrix * float("nan"))
