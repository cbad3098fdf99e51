"""The way back to a smaller shape: layers fitted to joined channels, against a direct solution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from unlike_nets import SPEC, arch, plain, residual

from hfedatm_core import Update, collect_grams, merge_apart
from hfedatm_core.apart.fitting import RIDGES
from hfedatm_core.resizing import Fit
from hfedatm_core.resizing.lowering import lowered
from hfedatm_core.resizing.merging import fits_of, merge_resized
from hfedatm_core.resizing.proving import random_state


def hidden(width):
    """Return a network whose last layer reads a hidden layer of this width."""
    return nn.Sequential(nn.Flatten(), nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 4))


def drawn(architecture, seed):
    return random_state(architecture, torch.Generator().manual_seed(seed))


def images(seed, count=60):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, *SPEC.input_shape, generator=generator).double()


def measured(architecture, state, inputs):
    architecture.model.double().load_state_dict(state)
    return collect_grams(architecture.model.eval(), [(inputs, None)], full=True, groups=False)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 999), st.integers(2, 9), st.integers(2, 9))
def test_the_last_layer_is_the_least_squares_solution(seed, wide, narrow):
    large, small = arch(hidden(wide)), arch(hidden(min(wide, narrow)))
    fit, state, inputs = Fit(large, small), drawn(large, seed), images(seed)
    found = lowered(fit, state, measured(large, state, inputs))
    (plan,) = fit.plans.values()
    h = torch.relu(inputs.flatten(1) @ state["1.weight"].double().T + state["1.bias"].double())
    y = h @ state["3.weight"].double().T + state["3.bias"].double()
    z = torch.cat([h @ plan.columns.T, torch.ones(len(h), 1)], 1)
    before = fit.down(state)
    v = torch.cat([before["3.weight"], before["3.bias"][:, None]], 1).double()
    gram = z.T @ z / len(z)
    missing = (y - z @ v.T).T @ z / len(z)
    one = gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    solutions = [v + torch.linalg.solve(gram + ridge * one, missing.T).T for ridge in RIDGES]
    got = torch.cat([found["3.weight"], found["3.bias"][:, None]], 1).double()
    close = [torch.allclose(got, best, rtol=1e-5, atol=1e-7) for best in (*solutions, v)]
    assert any(close)  # cross-validation chose one of the ridges, or that nothing helps

    def left(matrix):
        return float((y - z @ matrix.T).square().sum())

    assert left(got) <= left(v) + 1e-20


def test_inputs_that_tell_much_are_used_with_the_least_ridge():
    """The joined channels are copies but for their scale, so their mean tells both exactly."""
    large, small = arch(hidden(6)), arch(hidden(3))
    fit, state, inputs = Fit(large, small), drawn(large, 2), images(2)
    for name in ("1.weight", "1.bias"):
        state[name][1::2] = 3 * state[name][::2]
    found = lowered(fit, state, measured(large, state, inputs))
    wanted = large.outputs(state, inputs)
    joined, fitted = (
        float((small.outputs(s, inputs) - wanted).square().mean()) for s in (fit.down(state), found)
    )
    assert fitted < 1e-4 * joined


def test_layers_in_the_middle_keep_the_spread_of_what_they_join():
    large, small = arch(plain([6, 8], 10)), arch(plain([3, 4], 5))
    fit, state, inputs = Fit(large, small), drawn(large, 3), images(3)
    grams = measured(large, state, inputs)
    found = lowered(fit, state, grams)
    outputs = {}
    model = large.model.eval()
    model.load_state_dict(state)
    model[5].register_forward_hook(lambda _, __, y: outputs.update(y=y))  # behind its BatchNorm
    model(inputs)
    joined = torch.einsum("ij,bjhw->bihw", fit.plans["4"].columns, outputs["y"])
    wanted = joined.transpose(0, 1).flatten(1)
    assert set(fit.down_grams(grams)) == {"0", "4", "9", "11"}
    torch.testing.assert_close(found["5.bias"].double(), wanted.mean(1), rtol=1e-4, atol=1e-5)
    deviation = wanted.std(1, unbiased=False)
    torch.testing.assert_close(found["5.weight"].double(), deviation, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [lambda w: plain([3 * w, 4 * w], 5 * w), hidden])
def test_what_was_split_comes_back_unchanged(make):
    small, large = arch(make(2)), arch(make(4))
    fit, state, inputs = Fit(large, small), drawn(small, 5), images(5)
    wide = fit.up(state)
    back = lowered(fit, wide, measured(large, wide, inputs))
    torch.testing.assert_close(
        small.outputs(back, inputs), small.outputs(state, inputs), rtol=1e-5, atol=1e-6
    )


def merged_of(nets, keep_grams):
    archs = {name: arch(make()) for name, make in nets.items()}
    inputs = images(1)
    states = {name: drawn(a, n) for n, (name, a) in enumerate(archs.items())}
    updates = {n: Update(s, measured(archs[n], s, inputs), name=n) for n, s in states.items()}
    graph = archs["large"].graph
    return merge_resized(
        updates.__getitem__,
        fits_of(archs["large"], archs),
        lambda stream: merge_apart(stream, graph, keep_grams=keep_grams),
    )


def test_a_merge_that_keeps_its_grams_fits_the_way_back():
    nets = {"large": lambda: plain([6, 8], 10), "small": lambda: plain([3, 4], 5)}
    with_grams, without = (merged_of(nets, keep) for keep in (True, False))
    for name, value in without.merged.state.items():
        assert torch.equal(with_grams.merged.state[name], value), name
    assert with_grams.merged.grams.keys() == {"0", "4", "9", "11"} and not without.merged.grams
    for name in nets:
        fitted, as_it_is = with_grams.back(name), without.back(name)
        same = all(torch.equal(fitted[n], v) for n, v in as_it_is.items())
        assert same == (name == "large")


def test_a_network_that_lacks_a_block_goes_down_as_it_is():
    nets = {"large": lambda: residual(4, 2), "small": lambda: residual(2, 1)}
    with_grams, without = (merged_of(nets, keep) for keep in (True, False))
    fitted, as_it_is = with_grams.back("small"), without.back("small")
    assert all(torch.equal(fitted[n], v) for n, v in as_it_is.items())
