r"""Attack a Gram: rebuild the activations it was made of.

A Gram of n rows determines the rows up to an orthogonal factor: with the eigenvectors V and the n
largest eigenvalues of :math:`nG = X^\top X = V \Lambda V^\top`,

.. math:: X = Q \Lambda^{1/2} V^\top, \qquad Q \in O(n) \text{ unknown.}

Activations behind a ReLU are not negative, and few rotations keep all n rows non-negative. The
attack searches for such a rotation with L-BFGS from several random starts, minimising the squared
negative part. When few rows were averaged, it finds the activations themselves. For layers with
signed inputs every rotation remains possible, so this search does not apply to them (which does not
prove that nothing leaks).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

RECOVERED_COSINE = 0.99


@dataclass(frozen=True)
class AuditResult:
    """The result of the attack.

    Attributes
    ----------
    attacked
        False when the layer's inputs have both signs: every rotation remains possible.
    of
        Number of rows in the Gram.
    recovered
        How many true rows were found (cosine above 0.99); None without the truth.
    without_search
        How many true rows have a cosine above 0.99 with the first eigenvector alone: such rows are
        so alike that finding them says little. None without the truth.
    cosines
        Cosine of each true row with the reconstructed row it was matched to.
    violation
        Share of the reconstruction's energy that is negative; ~0 for a consistent solution.
    reconstruction
        The reconstructed rows (n x d), in the order of the true rows if these were given.
    """

    attacked: bool
    of: int
    recovered: int | None = None
    without_search: int | None = None
    cosines: tuple[float, ...] = ()
    violation: float | None = None
    reconstruction: Tensor | None = None

    def summary(self) -> str:
        """Return the result in one sentence."""
        if not self.attacked:
            return "inputs have both signs: freedom of rotation remains; not attacked"
        if self.recovered is None:
            return f"{self.of} rows reconstructed, negative share {self.violation:.1e}"
        return (
            f"{self.recovered} of {self.of} rows recovered (cosine > {RECOVERED_COSINE}); "
            f"{self.without_search} without any search"
        )


def audit(
    gram: Tensor,
    rows: int,
    true_rows: Tensor | None = None,
    *,
    starts: int = 8,
    iterations: int = 500,
    seed: int = 0,
) -> AuditResult:
    """Reconstruct the rows behind a Gram and say how many are right.

    Parameters
    ----------
    gram
        d x d, the mean of x x^T over ``rows`` rows (any positive scale will do), as released.
    rows
        How many rows it was made of.
    true_rows
        The activations (n x d), to score the attack. If they have both signs, nothing is attacked.
    starts, iterations, seed
        Random rotations to start from, L-BFGS iterations, and the seed of the search.
    """
    _check(gram, rows, true_rows)
    if true_rows is not None and bool((true_rows < 0).any()):
        return AuditResult(attacked=False, of=rows)
    factor = eigenfactor(gram, rows)
    reconstruction, violation = nonnegative_rotation(factor, starts, iterations, seed)
    reconstruction = reconstruction * float(rows) ** 0.5
    if true_rows is None:
        return AuditResult(True, rows, violation=violation, reconstruction=reconstruction)
    order, cosines = match_rows(reconstruction, true_rows)
    leading = factor[-1:].abs()
    alone = _cosines(true_rows, leading).flatten()
    return AuditResult(
        attacked=True,
        of=rows,
        recovered=int((cosines > RECOVERED_COSINE).sum()),
        without_search=int((alone > RECOVERED_COSINE).sum()),
        cosines=tuple(cosines.tolist()),
        violation=violation,
        reconstruction=reconstruction[order],
    )


def eigenfactor(gram: Tensor, rows: int) -> Tensor:
    """Return F (rows x d) with the best F^T F ~ gram; the row of the largest eigenvalue is last."""
    values, vectors = torch.linalg.eigh((gram.double() + gram.double().T) / 2)
    count = min(rows, gram.shape[0])
    top = vectors[:, -count:] * values[-count:].clamp_min(0).sqrt()
    return torch.cat([top.new_zeros(rows - count, gram.shape[0]), top.T])


def nonnegative_rotation(
    factor: Tensor, starts: int, iterations: int, seed: int
) -> tuple[Tensor, float]:
    """Return Q F with the smallest negative part over the starts, and its share of the energy."""
    energy = factor.square().sum()
    if energy == 0:
        raise ValueError("the Gram has no positive eigenvalue: there is nothing to reconstruct")
    unit = factor / energy.sqrt()
    count = factor.shape[0]
    generator = torch.Generator().manual_seed(seed)
    shape = (starts, count, count)
    origin = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=unit.dtype)).Q
    skew = torch.zeros(shape, dtype=unit.dtype, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [skew],
        max_iter=iterations,
        history_size=20,
        tolerance_grad=1e-10,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def candidates() -> Tensor:
        rotated: Tensor = torch.matrix_exp(skew - skew.mT) @ origin @ unit
        return rotated

    def negative_energy() -> Tensor:
        return candidates().clamp_max(0).square().sum(dim=(1, 2))

    def closure() -> float:
        optimiser.zero_grad()
        loss = negative_energy().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        negative = negative_energy()
        best = int(negative.argmin())
        return candidates()[best] * energy.sqrt(), float(negative[best])


def match_rows(found: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Assign found rows to true rows; return the assignment and the cosine of each true row."""
    cosines = _cosines(truth, found)
    rows, columns = linear_sum_assignment(-cosines.numpy())
    return torch.as_tensor(columns), cosines[rows, columns]


def _cosines(left: Tensor, right: Tensor) -> Tensor:
    normalise = torch.nn.functional.normalize
    return normalise(left.double(), dim=1) @ normalise(right.double(), dim=1).T


def _check(gram: Tensor, rows: int, true_rows: Tensor | None) -> None:
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise ValueError(f"the Gram must be square, got shape {tuple(gram.shape)}")
    if not torch.isfinite(gram).all():
        raise ValueError("the Gram holds NaN or infinite entries")
    if rows < 1:
        raise ValueError(f"a Gram is made of at least one row, got {rows}")
    expected = (rows, gram.shape[0])
    if true_rows is not None and tuple(true_rows.shape) != expected:
        raise ValueError(f"true_rows has shape {tuple(true_rows.shape)}, expected {expected}")
