"""Merging networks of different shapes: matching, votes, and the way back."""

import pytest
import torch
from unlike_nets import SPEC, arch, plain, residual

from hfedatm_core import Update, collect_grams, merge, merge_apart
from hfedatm_core.averaging import MeanAccumulator
from hfedatm_core.merge_report import Merged, MergeReport
from hfedatm_core.resizing import Fit
from hfedatm_core.resizing.matching import empty_from, match_plans
from hfedatm_core.resizing.merging import fits_of, merge_resized, reading_order, way_back
from hfedatm_core.resizing.plans import even_plan
from hfedatm_core.resizing.proving import random_state
from hfedatm_core.robust.bounding import measure, usual

INPUTS = torch.rand(40, *SPEC.input_shape, generator=torch.Generator().manual_seed(9)).double()


def drawn(architecture, seed):
    return random_state(architecture, torch.Generator().manual_seed(seed))


def measured(architecture, state):
    architecture.model.double().load_state_dict(state)
    return collect_grams(architecture.model.eval(), [(INPUTS, None)], full=True, groups=False)


def shuffled(architecture, state, seed):
    generator = torch.Generator().manual_seed(seed)
    groups = architecture.graph.groups
    orders = {g.name: torch.randperm(g.size, generator=generator) for g in groups}
    return architecture.graph.permute(state, orders)


@pytest.mark.parametrize("with_grams", [False, True])
def test_a_split_and_shuffled_network_is_found_again(with_grams):
    """The wide network is the narrow one split unevenly and shuffled: merging changes nothing."""
    small, large = arch(plain([3, 4], 5), "small"), arch(plain([5, 7], 8), "large")
    state = drawn(small, 1)
    fit = Fit(large, small)
    wide = shuffled(large, fit.up(state), 2)
    updates = {
        name: Update(s, measured(a, s) if with_grams else {}, name=name)
        for name, a, s in (("narrow", small, state), ("wide", large, wide))
    }
    plans = match_plans(
        fit, wide, state, updates["wide"].grams or None, updates["narrow"].grams or None
    )
    grown = fit.with_plans(plans).up(state)
    for name, value in wide.items():
        if not name.startswith(("4.", "9.", "11.")) or value.dim() < 2:  # readers share a split
            torch.testing.assert_close(grown[name], value)
    torch.testing.assert_close(large.outputs(grown, INPUTS), large.outputs(wide, INPUTS))
    fits = fits_of(large, {"narrow": small, "wide": large})
    assert reading_order(fits) == ["wide", "narrow"]
    how = merge_apart if with_grams else merge
    done = merge_resized(updates.__getitem__, fits, lambda u: how(u, large.graph))
    expected = small.outputs(state, INPUTS)
    torch.testing.assert_close(
        large.outputs(done.merged.state, INPUTS), expected, rtol=1e-4, atol=1e-4
    )
    for name, a in (("narrow", small), ("wide", large)):
        back = a.outputs(done.back(name), INPUTS)
        torch.testing.assert_close(back, expected, rtol=1e-4, atol=1e-4)


def test_the_way_back_follows_channels_that_the_merge_moved_once_more():
    small, large = arch(plain([3, 4], 5)), arch(plain([5, 7], 8))
    fit, state = Fit(large, small), drawn(large, 1)
    generator = torch.Generator().manual_seed(2)
    orders = {g.name: torch.randperm(g.size, generator=generator) for g in large.graph.groups}
    # The merge gave the channels of this network, and so of its result, another order.
    result = large.graph.permute(state, orders)
    merged = Merged(result, MergeReport("wide", {}, {}), {"narrow": orders}, result)
    back = way_back(fit, merged, "narrow").down(result)
    for name, value in fit.down(state).items():
        torch.testing.assert_close(back[name], value)


def test_a_block_comes_from_those_who_have_it():
    small, large = arch(residual(4, 1), "small"), arch(residual(4, 2), "large")
    states = {
        "a": drawn(small, 1),
        "b": drawn(large, 2),
        "c": drawn(small, 3),
        "d": drawn(large, 4),
    }
    archs = {"a": small, "b": large, "c": small, "d": large}
    sizes = {"a": 1, "b": 2, "c": 5, "d": 6}
    fits = fits_of(large, archs)
    done = merge_resized(
        lambda n: Update(states[n], {}, sizes[n], name=n),
        fits,
        lambda u: merge(u, large.graph, fot=False, regmean=False),
    )
    plans = done.fits["a"].plans
    assert (
        done.fits["b"].is_same
        and done.fits["d"].is_same
        and set(plans) == set(done.fits["c"].plans)
    )
    voted = (2 * states["b"]["1.1.conv1.weight"] + 6 * states["d"]["1.1.conv1.weight"]) / 8
    torch.testing.assert_close(done.merged.state["1.1.conv1.weight"], voted)
    all_four = sum(sizes[n] * done.fits[n].up(states[n])["0.0.weight"] for n in states) / sum(
        sizes.values()
    )
    torch.testing.assert_close(done.merged.state["0.0.weight"], all_four)


@pytest.mark.parametrize("first", ["small", "large"])
def test_regmean_merges_a_block_by_the_grams_of_those_who_have_it(first):
    """Whoever is read first: the layers of a block are merged as if only its owners were there."""
    small, large = arch(residual(4, 1)), arch(residual(4, 2))
    fit = Fit(large, small)
    a, b, c = drawn(large, 1), drawn(large, 2), drawn(small, 3)
    owners = [Update(s, measured(large, s), name=n) for n, s in (("a", a), ("b", b))]
    lacking = Update(
        fit.up(c), fit.up_grams(measured(small, c)), name="c", absent=frozenset(fit.absent)
    )
    order = [lacking, *owners] if first == "small" else [*owners, lacking]
    options = {"fot": False, "regmean": True}
    alone = merge(owners, large.graph, **options)
    together = merge(order, large.graph, **options)
    assert together.report.layers["1.1.conv2"].how == "regmean"
    for name in fit.absent:
        if name.endswith(".weight"):
            torch.testing.assert_close(
                together.state[name], alone.state[name], rtol=1e-5, atol=1e-6
            )
    assert not torch.allclose(together.state["2.2.weight"], alone.state["2.2.weight"])
    apart = merge_apart(order, large.graph)
    assert apart.report.layers["1.1.conv2"].how == "regmean" and "1.1.conv2" in apart.report.quality


def test_channels_without_a_partner_are_the_references():
    small, large = arch(plain([3, 4], 5)), arch(plain([9, 9], 9))
    reference, state = drawn(large, 1), drawn(small, 2)
    fit = Fit(large, small)
    fit = fit.with_plans(match_plans(fit, reference, state, leave=0.0))
    alone = fit.plans["0"].empty
    assert int(alone.sum()) == 6
    filled = empty_from(fit, fit.up(state), reference)
    assert torch.equal(filled["0.weight"][alone], reference["0.weight"][alone])
    assert torch.equal(filled["4.weight"][:, alone], reference["4.weight"][:, alone])
    assert not torch.equal(filled["0.weight"][~alone], reference["0.weight"][~alone])


def test_such_channels_do_not_pull_the_merge_towards_zero():
    small, large = arch(plain([3, 4], 5)), arch(plain([9, 9], 9))
    updates = {
        "wide": Update(drawn(large, 1), name="wide"),
        "narrow": Update(drawn(small, 2), name="narrow"),
    }
    fits = fits_of(large, {"wide": large, "narrow": small})
    done = merge_resized(
        updates.__getitem__, fits, lambda u: merge(u, fot=False, regmean=False), leave=0.0
    )
    alone = done.fits["narrow"].plans["0"].empty
    assert int(alone.sum()) == 6
    merged, wide = (s["0.weight"] for s in (done.merged.state, updates["wide"].state))
    torch.testing.assert_close(merged[alone], wide[alone])
    assert not torch.allclose(merged[~alone], wide[~alone])


# --- votes


def test_the_mean_of_a_tensor_is_that_of_its_voters():
    states = [{"a": torch.tensor([float(n)]), "b": torch.tensor([float(n)])} for n in (1, 2, 4)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        mean = MeanAccumulator()
        for n in order:
            mean.add(states[n], n + 1, absent={"b"} if n == 0 else frozenset())
        found = mean.result()
        assert float(found["a"]) == pytest.approx((1 + 4 + 12) / 6)
        assert float(found["b"]) == pytest.approx((4 + 12) / 5)


def test_the_usual_move_of_a_tensor_is_that_of_its_voters():
    start = {"a": torch.zeros(1), "b": torch.zeros(1)}
    lacking = Update({"a": torch.ones(1), "b": torch.zeros(1)}, absent=frozenset({"b"}))
    having = Update({"a": torch.ones(1), "b": torch.full((1,), 3.0)})
    sizes = [measure(update, start) for update in (lacking, lacking, having)]
    found = usual(sizes, start)
    assert found.moves == {"a": 1.0, "b": 3.0}


def test_the_reference_is_the_network_that_lacks_least():
    nets = {"a": plain([3, 4], 5), "b": plain([6, 6], 6), "c": plain([4, 5], 6)}
    archs = {name: arch(net, name) for name, net in nets.items()}
    fits = {name: Fit(archs["b"], a) for name, a in archs.items()}
    assert reading_order(fits) == ["b", "a", "c"]
    fits = {name: Fit(archs["a"], a) for name, a in archs.items() if name != "a"}
    assert reading_order(fits) == ["c", "b"]
    assert even_plan(4, 2).mass.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
