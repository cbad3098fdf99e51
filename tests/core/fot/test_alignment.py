"""Alignment: it finds what was permuted, keeps the function, and leaves alone what is right."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from nets import LARGE, SMALL, KernelNet, build, output, randomise
from torch import Tensor, nn
from torch.nn import functional as F

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.data import DataSpec
from hfedatm_core.fot.alignment import Aligner, Alignment, align
from hfedatm_core.fot.assignment import assign, sinkhorn_plan
from hfedatm_core.fot.filters import Filters
from hfedatm_core.fot.options import AlignmentOptions
from hfedatm_core.grams.gram import Gram
from hfedatm_core.models import resnet18

EXACT, EVERYTHING = AlignmentOptions(solver="exact"), AlignmentOptions(scope="all")
SEEDS = st.integers(0, 2**16)
quick = settings(max_examples=8)


def permuted_copy(
    state: dict[str, Tensor], graph: ChannelGraph, seed: int, kinds: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shuffles = {
        group.name: torch.randperm(group.size, generator=generator)
        for group in graph.groups
        if group.kind in kinds
    }
    return graph.permute(state, shuffles), shuffles


def assert_recovered(result: Alignment, state: dict[str, Tensor], shuffles: dict) -> None:
    assert {name: p.tolist() for name, p in result.permutations.items()} == {
        name: torch.argsort(shuffles[name]).tolist() for name in result.permutations
    }
    assert set(shuffles) <= set(result.permutations)
    for name, tensor in state.items():
        assert torch.equal(result.state[name], tensor), name


def input_grams(model: nn.Module, x: Tensor) -> tuple[dict[str, Gram], dict[str, Tensor]]:
    """Grams of the inputs of all Linear layers, straight from their definition."""
    inputs: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda m, args, name=name: inputs.update({name: args[0]}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    dense = {n: (lambda r: r.T @ r / len(r))(t.flatten(0, -2)) for n, t in inputs.items()}
    return {name: Gram.from_dense(matrix) for name, matrix in dense.items()}, dense


# --- permuted copies --------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["sinkhorn", "exact"])
@pytest.mark.parametrize("name", [n for n in SMALL if n != "conv-transformer"])
@given(seed=SEEDS)
@quick
def test_a_permuted_copy_is_brought_back(name: str, solver: str, seed: int) -> None:
    model, x = build(name, seed)
    graph, state = ChannelGraph.trace(model, (x,)), model.state_dict()
    copy, shuffles = permuted_copy(state, graph, seed, ("conv", "linear"))
    assert_recovered(
        align(copy, state, graph, options=AlignmentOptions(solver=solver, scope="all")),
        state,
        shuffles,
    )


@given(seed=SEEDS)
@quick
def test_scope_conv_brings_back_conv_channels_only(seed: int) -> None:
    model, x = build("lenet5-bn", seed)
    graph, state = ChannelGraph.trace(model, (x,)), model.state_dict()
    copy, shuffles = permuted_copy(state, graph, seed, ("conv",))
    assert_recovered(align(copy, state, graph), state, shuffles)
    copy, _ = permuted_copy(state, graph, seed, ("linear",))
    result = align(copy, state, graph)
    assert set(result.permutations) == {"conv1", "conv2"}
    assert result.moved == {"conv1": 0, "conv2": 0}
    assert torch.equal(result.state["fc1.weight"], copy["fc1.weight"])


@pytest.mark.parametrize("name", LARGE)
def test_a_permuted_copy_of_a_large_network_is_brought_back(name: str) -> None:
    model, x = build(name)
    graph, state = ChannelGraph.trace(model, (x,)), model.state_dict()
    copy, shuffles = permuted_copy(state, graph, 1, ("conv", "linear"))
    result = align(copy, state, graph, options=EVERYTHING)
    assert_recovered(result, state, shuffles)
    assert all(result.cost[g] < 1e-9 * result.identity_cost[g] for g in shuffles)


def test_a_noisy_permuted_copy_in_float32_is_brought_back() -> None:
    model, x = build("resnet18")
    graph = ChannelGraph.trace(model, (x,))
    state = {k: v.float() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    copy, shuffles = permuted_copy(state, graph, 1, ("conv",))
    noisy = {
        k: v + 0.1 * v.std() * torch.randn_like(v) if v.dim() > 1 else v for k, v in copy.items()
    }
    result = align(noisy, state, graph)
    found = {name: p.tolist() for name, p in result.permutations.items()}
    assert found == {name: torch.argsort(p).tolist() for name, p in shuffles.items()}


# --- the function stays -------------------------------------------------------------------------


EVERY_WAY = [(solver, scope) for solver in ("sinkhorn", "exact") for scope in ("conv", "all")]


@pytest.mark.parametrize(
    ("name", "solver", "scope"),
    [
        *((name, *way) for name in SMALL for way in EVERY_WAY),
        *((name, *way) for name in LARGE for way in (("sinkhorn", "conv"), ("exact", "all"))),
    ],
)
def test_alignment_to_an_unrelated_network_keeps_the_function(
    name: str, solver: str, scope: str
) -> None:
    reference, _ = build(name, 1)
    station, x = build(name, 2)
    graph, state = ChannelGraph.trace(station, (x,)), station.state_dict()
    result = align(
        state, reference.state_dict(), graph, options=AlignmentOptions(solver=solver, scope=scope)
    )
    aligned_groups = {g.name for g in graph.groups if scope == "all" or g.kind == "conv"}
    assert set(result.moved) == aligned_groups
    assert not aligned_groups or sum(result.moved.values()) > 0
    before, after = output(station, state, x), output(station, result.state, x)
    torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)
    for group in graph.groups:
        if group.name in aligned_groups:
            permutation = result.permutations[group.name]
            assert permutation.dtype == torch.int64
            assert permutation.sort().values.tolist() == list(range(group.size))
            assert result.moved[group.name] == sum(i != p for i, p in enumerate(permutation))
            assert result.cost[group.name] <= result.identity_cost[group.name]


def test_integer_buffers_are_untouched() -> None:
    reference, x = build("lenet5-bn", 1)
    state = build("lenet5-bn", 2)[0].state_dict()
    result = align(
        state, reference.state_dict(), ChannelGraph.trace(reference, (x,)), options=EVERYTHING
    )
    counter = result.state["bn1.num_batches_tracked"]
    assert counter.dtype == torch.int64 and counter.item() == 17


def test_the_station_is_not_modified() -> None:
    reference, x = build("lenet5-bn", 1)
    state = build("lenet5-bn", 2)[0].state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    align(state, reference.state_dict(), ChannelGraph.trace(reference, (x,)), options=EVERYTHING)
    assert all(torch.equal(before[name], tensor) for name, tensor in state.items())


# --- Grams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lenet5", "residual", "concat", "channels-last", "transformer"])
def test_grams_follow_their_inputs(name: str) -> None:
    reference, _ = build(name, 1)
    station, x = build(name, 2)
    graph = ChannelGraph.trace(station, (x,))
    grams, before = input_grams(station, x)
    result = align(station.state_dict(), reference.state_dict(), graph, grams, options=EVERYTHING)
    station.load_state_dict(result.state)
    _, wanted = input_grams(station, x)
    assert set(result.grams) == set(wanted)
    for layer, matrix in wanted.items():
        torch.testing.assert_close(result.grams[layer].dense(), matrix, rtol=1e-9, atol=1e-12)
    assert any(not torch.allclose(before[layer], wanted[layer]) for layer in wanted)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.left, self.right = nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.body(x))
        return self.left(x), self.right(x)


def test_layers_with_one_input_keep_sharing_their_gram() -> None:
    torch.manual_seed(0)
    station, reference = TwoHeads(), TwoHeads()
    graph = ChannelGraph.trace(station, (torch.zeros(1, 4),))
    gram = Gram.from_dense(torch.diag(torch.arange(6.0)))
    grams = {"left": gram, "right": gram}
    result = align(station.state_dict(), reference.state_dict(), graph, grams, options=EVERYTHING)
    assert result.moved["body"]
    assert result.grams["left"] is result.grams["right"]
    assert result.grams["left"].diagonal().tolist() == result.permutations["body"].tolist()


def test_a_conv_gram_with_a_bias_feature_moves_by_patches() -> None:
    reference, x = build("kernel", 1)
    station, _ = build("kernel", 2)
    graph = ChannelGraph.trace(reference, (x,))
    gram = Gram.from_dense(torch.diag(torch.arange(8 * 9 + 1.0)))
    result = align(station.state_dict(), reference.state_dict(), graph, {"conv2": gram})
    permutation = result.permutations["conv1"]
    blocks = (permutation[:, None] * 9 + torch.arange(9)).flatten().tolist()
    assert result.moved["conv1"]
    assert result.grams["conv2"].diagonal().tolist() == [*blocks, 72]


def test_a_gram_that_does_not_fit_is_refused() -> None:
    model, x = build("lenet5")
    graph, state = ChannelGraph.trace(model, (x,)), model.state_dict()
    with pytest.raises(ValueError, match=r"fc1 has 5 features.*\(20, 64\)"):
        align(state, state, graph, {"fc1": Gram.from_dense(torch.eye(5))})
    with pytest.raises(ValueError, match=r"no weight matrix nowhere\.weight"):
        align(state, state, graph, {"nowhere": Gram.from_dense(torch.eye(5))})


# --- solvers ------------------------------------------------------------------------------------

squares = st.integers(1, 12).flatmap(
    lambda n: hnp.arrays(np.float64, (n, n), elements=st.floats(0, 4, width=16))
)


def total(cost: np.ndarray, permutation: Tensor) -> float:
    return float(cost[np.arange(len(cost)), permutation.numpy()].sum())


@given(cost=squares)
@settings(max_examples=100)
def test_solvers_give_bijections_and_exact_is_cheapest(cost: np.ndarray) -> None:
    exact, entropic = (
        assign(torch.from_numpy(cost), AlignmentOptions(solver=s)) for s in ("exact", "sinkhorn")
    )
    for permutation in (exact, entropic):
        assert sorted(permutation.tolist()) == list(range(len(cost)))
    assert total(cost, exact) <= total(cost, entropic) + 1e-12 * len(cost)
    assert total(cost, exact) <= np.trace(cost) + 1e-12 * len(cost)


@given(seed=SEEDS, n=st.integers(2, 24), reg=st.sampled_from([0.003, 0.05, 1.0]))
@settings(max_examples=30)
def test_the_plan_is_pots_plan(seed: int, n: int, reg: float) -> None:
    cost = np.random.default_rng(seed).uniform(0, 4, (n, n))
    weights = np.full(n, 1 / n)
    wanted = ot.sinkhorn(
        weights, weights, cost, reg, method="sinkhorn_log", numItermax=25, stopThr=0, warn=False
    )
    plan = sinkhorn_plan(torch.from_numpy(cost), reg)
    np.testing.assert_allclose(plan, wanted, rtol=1e-9, atol=1e-12)
    single = sinkhorn_plan(torch.from_numpy(cost / 3).float(), reg)  # in float32 where that is safe
    wanted = ot.sinkhorn(
        weights, weights, cost / 3, reg, method="sinkhorn_log", numItermax=25, stopThr=0, warn=False
    )
    np.testing.assert_allclose(single, wanted, atol=2e-4 / n)


def test_row_maxima_of_a_plan_collide_but_its_assignment_does_not() -> None:
    torch.manual_seed(0)
    left, right = F.normalize(torch.randn(64, 75)), F.normalize(torch.randn(64, 75))
    cost = 2 - 2 * left @ right.T
    assert len(set(sinkhorn_plan(cost).argmax(1).tolist())) < 64
    assert len(set(assign(cost).tolist())) == 64


@pytest.mark.parametrize("solver", ["sinkhorn", "exact"])
def test_ties_go_to_the_identity(solver: str) -> None:
    assert assign(torch.ones(5, 5), AlignmentOptions(solver=solver)).tolist() == [0, 1, 2, 3, 4]
    # Channels 0 and 1 must change places; 2, 3 and 4 are equal to each other, up to rounding.
    cost = torch.ones(5, 5, dtype=torch.float64)
    cost[:2, :2] = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    cost[2:, 2:] = 0
    for seed in range(20):
        noise = 4e-16 * torch.rand(5, 5, generator=torch.Generator().manual_seed(seed)).double()
        assert assign(cost + noise, AlignmentOptions(solver=solver)).tolist() == [1, 0, 2, 3, 4]


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="greedy"):
        AlignmentOptions(solver="greedy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        assign(torch.ones(2, 3))
    for option in ({"solver": "x"}, {"scope": "x"}, {"reg": 0.0}, {"iterations": 0}, {"margin": 1}):
        with pytest.raises(ValueError, match=next(iter(option))):
            AlignmentOptions(**option)  # type: ignore[arg-type]


# --- the cost and the guard ---------------------------------------------------------------------


def filters(weight: Tensor) -> Filters:
    return Filters(weight, 0, weight.shape[0], 1)


@given(seed=SEEDS)
@quick
def test_the_cost_is_the_squared_distance_of_normalised_filters(seed: int) -> None:
    torch.manual_seed(seed)
    left, right = torch.randn(2, 5, 3, 2, 2, dtype=torch.float64)
    left[1] = 0
    right[2:4] = 0
    rows = [F.normalize(side.flatten(1)) for side in (left, right)]
    wanted = torch.cdist(*rows) ** 2
    torch.testing.assert_close(filters(left).cost(filters(right)), wanted)


def test_the_cost_of_a_group_sums_all_tensors_that_write_it() -> None:
    model, x = build("residual")
    graph, state = ChannelGraph.trace(model, (x,)), model.state_dict()
    copy, _ = permuted_copy(state, graph, 1, ("conv",))
    noisy = {k: v + 0.02 * torch.randn_like(v) if v.dim() > 1 else v for k, v in copy.items()}
    result = align(noisy, state, graph)
    assert result.moved["stem"]
    distances = [
        F.normalize(state[name].flatten(1)) - F.normalize(result.state[name].flatten(1))
        for name in ("stem.weight", "outer.weight", "direct.weight")
    ]
    wanted = sum(float(difference.square().sum()) for difference in distances)
    assert result.cost["stem"] == pytest.approx(wanted, rel=1e-9)


@given(seed=SEEDS, noise=st.floats(0, 2), n=st.integers(2, 8), dim=st.integers(1, 6))
@settings(max_examples=200)
def test_the_shortcut_to_the_identity_is_never_wrong(
    seed: int, noise: float, n: int, dim: int
) -> None:
    torch.manual_seed(seed)
    left = torch.randn(n, dim)
    right = left + noise * torch.randn(n, dim)
    trace = filters(left).certain_identity(filters(right))
    if trace is not None:
        cost = filters(left).cost(filters(right)).double().numpy()
        assert trace == pytest.approx(np.trace(cost), abs=1e-5)
        assert np.trace(cost) <= total(cost, assign(torch.from_numpy(cost), EXACT)) + 1e-5


@given(seed=SEEDS, n=st.integers(2, 12), dim=st.integers(1, 200), spread=st.floats(0, 3))
@quick
def test_the_bound_on_the_nearest_filters_is_never_above_them(
    seed: int, n: int, dim: int, spread: float
) -> None:
    torch.manual_seed(seed)
    one = filters(torch.randn(dim) + spread * torch.randn(n, dim))
    assert (one.nearest_bound <= one.nearest + 2e-3).all()
    assert one.nearest_bound.isfinite().all()


def test_the_bound_alone_takes_filters_that_hardly_moved() -> None:
    torch.manual_seed(0)
    left = torch.randn(64, 1152)
    one, near = filters(left), filters(left + 0.1 * torch.randn(64, 1152))
    assert one.certain_identity(near) is not None
    assert "nearest" not in vars(one)  # no product of all inputs


def test_the_shortcut_is_not_taken_where_two_filters_crossed() -> None:
    angles = torch.deg2rad(torch.tensor([[0.0, 40.0], [25.0, 15.0]]))
    left, right = torch.stack([angles.cos(), angles.sin()], -1)
    assert assign(filters(left).cost(filters(right)), EXACT).tolist() == [1, 0]
    assert filters(left).certain_identity(filters(right)) is None


def test_the_shortcut_takes_what_training_leaves_near_the_reference() -> None:
    torch.manual_seed(0)
    left = torch.randn(16, 50)
    near, elsewhere = left + 0.2 * torch.randn(16, 50), left[torch.randperm(16)]
    assert filters(left).certain_identity(filters(near)) is not None
    assert filters(left).certain_identity(filters(elsewhere)) is None


@pytest.mark.parametrize("solver", ["sinkhorn", "exact"])
def test_dead_and_equal_filters_stay_where_they_are(solver: str) -> None:
    reference, x = build("lenet5", 1)
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    state["conv1.weight"][2:4] = 0
    state["conv2.weight"][:] = state["conv2.weight"][0]
    graph = ChannelGraph.trace(reference, (x,))
    for target in (state, reference.state_dict()):
        result = align(state, target, graph, options=AlignmentOptions(solver=solver))
        assert result.moved == {"conv1": 0, "conv2": 0}
        assert all(np.isfinite(cost) for cost in result.cost.values())


@given(seed=SEEDS, margin=st.floats(0, 0.9))
@quick
def test_the_guard_keeps_the_identity_below_its_margin(seed: int, margin: float) -> None:
    reference, x = build("residual", seed)
    station, _ = build("residual", seed + 1)
    graph = ChannelGraph.trace(reference, (x,))
    result = align(
        station.state_dict(), reference.state_dict(), graph, options=AlignmentOptions(margin=margin)
    )
    for group, moved in result.moved.items():
        gain = result.identity_cost[group] - result.cost[group]
        assert gain > margin * result.identity_cost[group] if moved else gain == 0


def test_a_margin_refuses_what_no_margin_takes() -> None:
    reference, x = build("lenet5", 1)
    station, _ = build("lenet5", 2)
    graph = ChannelGraph.trace(reference, (x,))
    states = station.state_dict(), reference.state_dict()
    free = align(*states, graph)
    assert free.moved["conv1"] and free.moved["conv2"]
    gains = [1 - free.cost[g] / free.identity_cost[g] for g in ("conv1", "conv2")]
    assert align(*states, graph, options=AlignmentOptions(margin=max(gains) + 0.1)).moved == {
        "conv1": 0,
        "conv2": 0,
    }


@pytest.mark.parametrize("solver", ["sinkhorn", "exact"])
def test_a_station_near_the_reference_is_not_moved(solver: str) -> None:
    reference, x = build("resnet18")
    state = reference.state_dict()
    near = {
        k: v + 0.2 * v.std() * torch.randn_like(v) if v.dim() > 1 else v for k, v in state.items()
    }
    result = align(
        near, state, ChannelGraph.trace(reference, (x,)), options=AlignmentOptions(solver=solver)
    )
    assert not any(result.moved.values())
    assert result.cost == result.identity_cost
    assert all(result.state[name] is near[name] for name in near)


def test_one_aligner_serves_many_stations() -> None:
    reference, x = build("residual", 0)
    graph = ChannelGraph.trace(reference, (x,))
    aligner = Aligner(reference.state_dict(), graph)
    for seed in (1, 2):
        state = build("residual", seed)[0].state_dict()
        once, again = align(state, reference.state_dict(), graph), aligner(state)
        assert once.cost == again.cost
        assert all(torch.equal(once.state[k], again.state[k]) for k in state)


# --- kernel sizes and errors --------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), [(3, 5), (5, 3), (3, 7)])
def test_other_kernel_sizes_are_resized_before_matching(ours: int, theirs: int) -> None:
    torch.manual_seed(0)
    reference, station = KernelNet(ours).double(), KernelNet(theirs).double()
    randomise(reference)
    with torch.no_grad():
        for name, tensor in station.state_dict().items():
            source = reference.state_dict()[name]
            if source.dim() == 4:  # the middle of it, or in the middle of zeros
                border = (tensor.shape[-1] - source.shape[-1]) // 2
                source = F.pad(source, [border] * 4)
            tensor.copy_(source)
    graph = ChannelGraph.trace(reference, (torch.zeros(1, 3, 8, 8, dtype=torch.float64),))
    shuffle = {"conv1": torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])}
    copy = graph.permute(station.state_dict(), shuffle)
    result = align(copy, reference.state_dict(), graph)
    assert result.permutations["conv1"].tolist() == torch.argsort(shuffle["conv1"]).tolist()
    reference.load_state_dict(result.state)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 3), (3, 5), (3, 7)])
def test_a_smaller_kernel_keeps_its_function_in_a_larger_one(theirs: int, ours: int) -> None:
    torch.manual_seed(0)
    reference, station = KernelNet(ours).double(), KernelNet(theirs).double()
    randomise(reference), randomise(station)
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    graph = ChannelGraph.trace(reference, (x,))
    resized = align(station.state_dict(), reference.state_dict(), graph).state
    torch.testing.assert_close(output(reference, resized, x), station(x), rtol=1e-12, atol=1e-12)


def broken(change) -> tuple[dict[str, Tensor], dict[str, Tensor], ChannelGraph]:
    model, x = build("lenet5-bn")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(state)
    return state, model.state_dict(), ChannelGraph.trace(model, (x,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("conv2.bias"), r"conv2\.bias \(16,\) is missing"),
        (lambda s: s.update(extra=torch.ones(3)), r"extra \(3,\) is not in the reference"),
        (lambda s: s.update({"fc1.weight": torch.ones(20, 60)}), r"fc1\.weight.*20, 60.*20, 64"),
        (lambda s: s.update({"conv1.weight": torch.ones(6, 1, 5, 5)}), r"conv1\.w.*6, 1.*6, 3"),
        (lambda s: s["conv1.weight"].fill_(float("nan")), r"conv1\.weight of.*6, 3, 5.*NaN"),
        (lambda s: s["bn1.running_var"][:1].fill_(float("inf")), r"bn1\.running_var.*infinite"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused(change, message: str) -> None:
    state, reference, graph = broken(change)
    with pytest.raises(ValueError, match=message):
        align(state, reference, graph)


def test_a_reference_that_is_not_finite_or_not_the_graphs_is_refused() -> None:
    state, good, graph = broken(lambda s: s["fc1.bias"].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"the reference: fc1\.bias"):
        align(good, state, graph)
    with pytest.raises(ValueError, match=r"conv1\.weight.*another architecture"):
        align({}, {}, graph)
    narrow = {**good, "conv1.weight": torch.ones(4, 3, 5, 5)}
    with pytest.raises(ValueError, match=r"conv1\.weight has shape \(4, 3, 5, 5\)"):
        align(narrow, narrow, graph)


def test_large_finite_values_are_no_infinity() -> None:
    model, x = build("lenet5")
    state = {k: v.float() for k, v in model.state_dict().items()}
    state["fc3.bias"] = torch.full((10,), 3e38)
    align(state, state, ChannelGraph.trace(model, (x,)))


def test_a_noisy_permuted_resnet_is_recovered():
    """A residual group is matched once the branch inside it is: its stem alone is too little."""
    spec = DataSpec("image", 7, (3, 64, 64))
    torch.manual_seed(0)
    model = resnet18.build(spec)
    graph = ChannelGraph.trace(model, (spec.example(),))
    reference = model.state_dict()
    noisy = {
        name: value + 4 * value.std() * torch.randn(value.shape) if value.dim() > 1 else value
        for name, value in reference.items()
    }
    wanted = {group.name: torch.randperm(group.size) for group in graph.groups}
    back = {name: torch.argsort(permutation) for name, permutation in wanted.items()}
    found = align(graph.permute(noisy, back), reference, graph).permutations
    right = sum(int((found[name] == wanted[name]).sum()) for name in wanted)
    assert right > 0.97 * sum(len(permutation) for permutation in wanted.values())
