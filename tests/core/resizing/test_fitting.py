"""A network in another shape: the function is kept, the way back gives the network again."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unlike_nets import SPEC, arch, built, normed, plain, residual

from hfedatm_core import collect_grams
from hfedatm_core.grams.gram import FactorGram
from hfedatm_core.resizing import Fit, NoFit, prove
from hfedatm_core.resizing.plans import Plan, transport_plan
from hfedatm_core.resizing.proving import random_state
from hfedatm_core.resizing.starting import split_start

FEW = settings(max_examples=5, deadline=None)


def drawn(architecture, seed):
    return random_state(architecture, torch.Generator().manual_seed(seed))


def random_plans(fit, seed, leave=float("inf")):
    generator = torch.Generator().manual_seed(seed)
    return {
        group: transport_plan(torch.rand(sizes, generator=generator), leave)
        for group, sizes in fit.sizes.items()
    }


def same_function(small, state, large, grown):
    inputs = torch.rand(3, *SPEC.input_shape, dtype=torch.float64)
    one, other = small.outputs(state, inputs), large.outputs(grown, inputs)
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


widths = st.lists(st.integers(2, 5), min_size=3, max_size=3)


@FEW
@given(widths, widths, st.integers(0, 999), st.sampled_from([float("inf"), 0.3]))
def test_widening_keeps_the_function_and_narrowing_undoes_it(narrow, more, seed, leave):
    wide = [a + b - 1 for a, b in zip(narrow, more, strict=True)]
    small, large = arch(plain(narrow[:2], narrow[2])), arch(plain(wide[:2], wide[2]))
    fit = Fit(large, small)
    for one in (fit, fit.with_plans(random_plans(fit, seed, leave))):
        assert one.is_exact
        state = drawn(small, seed)
        grown = one.up(state)
        same_function(small, state, large, grown)
        back = one.down(grown)
        for name, value in state.items():
            torch.testing.assert_close(back[name], value, rtol=1e-12, atol=1e-12)
    prove(fit)
    # and the other way: the target is the smaller one
    fit = Fit(small, large, uneven=True)
    state = drawn(small, seed)
    grown = fit.down(state)
    same_function(small, state, large, grown)
    torch.testing.assert_close(fit.up(grown)["0.weight"], state["0.weight"])


@FEW
@given(st.integers(1, 2), st.integers(2, 4), st.integers(0, 2), st.integers(0, 999))
def test_a_missing_residual_block_is_the_identity(blocks, width, wider, seed):
    small = arch(residual(width, blocks))
    large = arch(residual(width + wider, blocks + 2, inner=4))
    fit = Fit(large, small)
    assert fit.lacks == [f"1.{blocks}", f"1.{blocks + 1}"]
    fit = fit.with_plans(random_plans(fit, seed))
    state = drawn(small, seed)
    grown = fit.up(state)
    same_function(small, state, large, grown)
    back = fit.down(grown)
    assert back.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(back[name], value)
    reverse = Fit(small, large)
    assert reverse.extra and not reverse.absent and not reverse.is_exact
    assert set(reverse.up(drawn(large, seed))) == set(small.shapes)
    if not wider:
        prove(reverse)


@pytest.mark.parametrize(
    ("large", "small", "lacks"),
    [
        (("lenet5", {"width": 2.0}), ("lenet5", {"width": 0.5}), []),
        (
            ("vgg13", {"batch_norm": True, "width": 0.125}),
            ("vgg11", {"batch_norm": True, "width": 0.0625}),
            ["features.3", "features.4", "features.10", "features.11"],
        ),
        (
            ("resnet34", {"width": 0.125}),
            ("resnet18", {"width": 0.0625}),
            ["layer1.2", "layer2.2", "layer2.3"],
        ),
    ],
)
def test_built_in_families_fit(large, small, lacks):
    def make(name, options):
        more = {} if name == "lenet5" else {"small_input": True}
        return built(name, **{"width": 0.0625, **more, **options})

    fit = Fit(make(*large), make(*small))
    prove(fit)
    assert fit.lacks[: len(lacks)] == lacks


def test_equal_shapes_are_the_same_objects():
    one, other = arch(plain([3, 4], 5)), arch(plain([3, 4], 5))
    fit, state = Fit(one, other), drawn(one, 0)
    assert fit.is_same
    moved = fit.up(state)
    assert all(moved[name] is state[name] for name in state)
    lifted = fit.lift(state, drawn(one, 1), drawn(one, 2))
    assert all(lifted[name] is state[name] for name in state)


# --- what cannot be matched is refused by name


def test_other_networks_are_refused_by_name():
    with pytest.raises(NoFit, match=r"b does not fit into a: .*LayerNorm|norms over channels"):
        prove(Fit(arch(normed(6), "a"), arch(normed(4), "b")))
    with pytest.raises(NoFit, match="b does not fit into a: "):
        Fit(arch(residual(3, 1), "a"), arch(plain([3], 7), "b"))
    with pytest.raises(NoFit, match="only lenet5 has the norm norm1"):
        Fit(built("lenet5"), built("lenet5", batch_norm=True))
    with pytest.raises(NoFit, match=r"7.weight has shape \(5, 7\), not \(4, 7\): its channels are"):
        other = plain([3], 7)
        other[7] = torch.nn.Linear(7, 5)
        Fit(arch(plain([3], 7)), arch(other))


def test_only_a_layer_that_can_be_the_identity_may_be_missing():
    def net(*widths, before=False):
        layers, inputs = [], 1
        for width in widths:
            layers += [torch.nn.Conv2d(inputs, width, 3, padding=1), torch.nn.ReLU()]
            inputs = width
        head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(inputs, 4)]
        parts = {"pre": torch.nn.Conv2d(1, 1, 3, padding=1)} if before else {}
        parts |= {"body": torch.nn.Sequential(*layers), "head": torch.nn.Sequential(*head)}
        return torch.nn.Sequential(OrderedDict(parts))

    flat = arch(net(3), "flat")
    prove(Fit(arch(net(3, 3), "deep"), flat))
    prove(Fit(arch(net(5, 4), "deep"), flat))
    with pytest.raises(NoFit, match=r"flat does not fit into deep: only one of them has pre \(its"):
        prove(Fit(arch(net(3, before=True), "deep"), flat))
    assert not Fit(arch(net(2, 3), "deep"), flat).is_exact  # three channels pass through two


# --- Grams


@FEW
@given(widths, st.integers(0, 999), st.booleans())
def test_grams_are_those_of_the_transported_network(narrow, seed, wider):
    """G' = A G Aᵀ: the Gram of the station, brought up, is the Gram that the target measures."""
    small = arch(plain(narrow[:2], narrow[2]))
    large = arch(plain([n + 2 for n in narrow[:2]], narrow[2] + 1))
    for one in (small, large):
        one.model.double()
    fit = Fit(large, small)
    if wider:
        fit = fit.with_plans(random_plans(fit, seed))
    state = drawn(small, seed)
    small.model.load_state_dict(state)
    large.model.load_state_dict(fit.up(state))
    batches = [(torch.rand(9, *SPEC.input_shape, dtype=torch.float64), None)]
    for options in ({}, {"full": True, "groups": False}):
        mine = fit.up_grams(collect_grams(small.model.eval(), batches, **options))
        right = collect_grams(large.model.eval(), batches, **options)
        assert mine.keys() == right.keys()
        for layer, gram in right.items():
            torch.testing.assert_close(mine[layer].dense(), gram.dense(), rtol=1e-9, atol=1e-9)
            assert mine[layer].rows == gram.rows


def test_a_factored_gram_is_transported_with_its_diagonal():
    small, large = arch(plain([2], 3)), arch(plain([4], 6))
    fit = Fit(large, small)
    rows = torch.randn(5, 3)
    gram = FactorGram(rows, rows.square().sum(0) + 0.5, 5)
    found = fit.up_grams({"7": gram})["7"]
    copies = fit.plans["5"].rows.float()
    torch.testing.assert_close(found.diagonal(), (copies @ gram.dense() @ copies.T).diagonal())
    torch.testing.assert_close(found.factor, rows @ copies.T)


# --- a station's training, brought up


@FEW
@given(widths, st.integers(0, 999))
def test_lifting_moves_the_target_as_the_station_moved(narrow, seed):
    """down(lift(trained)) is the trained network, and nothing moves if it did not train."""
    small = arch(plain(narrow[:2], narrow[2]))
    large = arch(plain([2 * n for n in narrow[:2]], 2 * narrow[2]))
    fit, previous = Fit(large, small), drawn(large, seed)
    sent = fit.down(previous)
    stayed = fit.lift(sent, sent, previous)
    for name, value in previous.items():
        torch.testing.assert_close(stayed[name], value)
    trained = {
        n: v + 0.1 * torch.rand_like(v) if v.is_floating_point() else v + 1 for n, v in sent.items()
    }
    for name in (n for n in sent if n.endswith("running_var")):
        trained[name] = sent[name] * (0.01 + torch.rand_like(sent[name]))  # it may also shrink
    lifted = fit.lift(trained, sent, previous)
    back = fit.down(lifted)
    for name, value in trained.items():
        if name.endswith("running_var"):
            factor = fit.along(name, value / sent[name], 0)
            torch.testing.assert_close(lifted[name], previous[name] * factor)
        else:
            torch.testing.assert_close(back[name], value)


@FEW
@given(widths, st.integers(0, 999))
def test_a_split_start_is_the_stations_own_start(narrow, seed):
    small = arch(plain(narrow[:2], narrow[2]))
    large = arch(plain([n + 3 for n in narrow[:2]], 2 * narrow[2]))
    fit, own, fresh = Fit(large, small), drawn(small, seed), drawn(large, seed)
    start = split_start(fit, fresh, own)
    for name, value in fit.down(start).items():
        torch.testing.assert_close(value, own[name])
    assert len(torch.unique(start["0.weight"], dim=0)) == len(start["0.weight"])  # no copies


def test_plans_follow_a_permutation_of_the_target():
    plan = Plan(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]).double())
    assert plan.after(torch.tensor([2, 0, 1])).mass.tolist() == [[0, 1], [1, 0], [0, 1]]
