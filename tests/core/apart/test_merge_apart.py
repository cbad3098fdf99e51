"""Networks that were trained apart: what the whole recipe keeps, finds and never does."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import build, output, randomise
from torch import Tensor, nn

from hfedatm_core import ChannelGraph, Profiles, Update, collect_grams, collect_profiles
from hfedatm_core.apart.folding import Moments, fold, fold_graph
from hfedatm_core.apart.merging import APART, merge_apart
from hfedatm_core.apart.outputs import layer_outputs
from hfedatm_core.apart.reference import Reference
from hfedatm_core.apart.repairing import layer_moments, repair_layer
from hfedatm_core.fot.costs.base import Cost, dissimilarity
from hfedatm_core.fot.costs.gram import GramCost, GramSide
from hfedatm_core.fot.costs.profile import ProfileCost
from hfedatm_core.fot.options import AlignmentOptions
from hfedatm_core.fot.sweeping import sweep
from hfedatm_core.grams.gram import Gram

NETS = ("lenet5", "lenet5-bn", "residual", "separable", "concat", "channels-last")
TRANSFORMERS = ("transformer", "conv-transformer", "heads")
COMPARED = [(n, k) for n in NETS for k in ("gram", "profile")] + [(n, "gram") for n in TRANSFORMERS]
SEEDS = st.integers(0, 2**16)


def measured(model: nn.Module, x: Tensor) -> dict[str, Gram]:
    return collect_grams(model, [(x, None)], full=True)


class Heads(nn.Module):
    """An attention layer with two heads, query, key and value apart, as in BERT and ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(6, 8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        parts = (
            part(x).unflatten(2, (2, 4)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        found = nn.functional.scaled_dot_product_attention(*parts)
        return self.head((x + self.out(found.transpose(1, 2).flatten(2))).mean(1))


@cache  # tracing takes longer than all that is tested
def network(name: str) -> tuple[nn.Module, Tensor, ChannelGraph]:
    if name == "heads":
        model, x = Heads().double().eval(), torch.randn(24, 5, 6, dtype=torch.float64)
        return model, x, ChannelGraph.trace(model, (x[:2],))
    model, x = build(name)
    if x.is_floating_point():
        x = torch.randn(24, *x.shape[1:], dtype=torch.float64)
    else:
        x = torch.randint(0, 16, (24, *x.shape[1:]))
    return model, x, ChannelGraph.trace(model, (x[:2],))


def other_weights(model: nn.Module, x: Tensor, seed: int) -> tuple[dict[str, Tensor], dict]:
    torch.manual_seed(seed)
    randomise(model)
    return {k: v.clone() for k, v in model.state_dict().items()}, measured(model, x)


def assert_same_function(model: nn.Module, one: dict, other: dict, x: Tensor) -> None:
    expected = output(model, one, x)
    torch.testing.assert_close(output(model, other, x), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", (*NETS, "conv-transformer", "heads"))
def test_equal_networks_are_a_fixed_point_whatever_their_data(name: str) -> None:
    model, x, graph = network(name)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    parts = [measured(model, part) for part in (x[:12], x[12:] * 3 + 1)]
    merged = merge_apart([Update(state, grams) for grams in parts], graph)
    without = merge_apart([Update(state, grams) for grams in parts], graph, repair=False)
    for key, value in without.state.items():  # nothing shrank: the repair has nothing to do
        torch.testing.assert_close(merged.state[key], value, rtol=1e-6, atol=1e-8)
    assert merged.moved == 0
    assert_same_function(model, state, merged.state, x)
    for quality in merged.report.quality.values():
        assert quality.variance_before == pytest.approx(1.0, abs=1e-6)
        assert quality.variance_after == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("name", "kind"), COMPARED)
def test_permuted_copies_merge_back_to_the_original(name: str, kind: str) -> None:
    model, x, graph = network(name)
    torch.manual_seed(0)
    randomise(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}

    def update(state: dict[str, Tensor]) -> Update:
        model.load_state_dict(state)
        found = profiled(model, state, x, graph) if kind == "profile" else None
        return Update(state, measured(model, x), profiles=found)

    updates = [update(state)]
    shuffles = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        shuffle = {g.name: torch.randperm(g.size, generator=generator) for g in graph.groups}
        updates.append(update(graph.permute(state, shuffle)))
        shuffles.append(shuffle)
    merged = merge_apart(iter(updates), graph)  # an iterator: every network is read once
    for number, shuffle in enumerate(shuffles, start=1):
        found = merged.permutations[f"station-{number}"]
        assert {n: p.tolist() for n, p in found.items()} == {
            n: torch.argsort(p).tolist() for n, p in shuffle.items()
        }
    assert_same_function(model, state, merged.state, x)
    for quality in merged.report.quality.values():
        if quality.correlation_after is not None:
            assert quality.correlation_after == pytest.approx(1.0, abs=1e-5)


def profiled(
    model: nn.Module, state: dict[str, Tensor], x: Tensor, graph: ChannelGraph
) -> Profiles:
    model.load_state_dict(state)
    labels = torch.arange(len(x)) % 3
    return collect_profiles(model, graph, [(x, labels)], classes=4)  # of one class there is none


def cost_between(
    kind: str, model: nn.Module, x: Tensor, graph: ChannelGraph, ours: tuple, theirs: tuple
) -> Cost:
    """Return a cost that compares two networks, each its weights and Grams."""
    sides = [GramSide(fold(state, graph), grams) for state, grams in (ours, theirs)]
    cost = GramCost(*sides, fold_graph(graph))
    if kind == "gram":
        return cost
    return ProfileCost(cost, *(profiled(model, state, x, graph) for state, _ in (ours, theirs)))


@pytest.mark.parametrize(("name", "kind"), COMPARED)
@settings(max_examples=2)
@given(seed=SEEDS)
def test_matching_is_a_bijection_that_keeps_the_function(name: str, kind: str, seed: int) -> None:
    model, x, graph = network(name)
    ours = other_weights(model, x, seed)
    theirs = other_weights(model, x, seed + 1)
    folded = fold_graph(graph)
    matches = sweep(folded, cost_between(kind, model, x, graph, ours, theirs), APART)
    assert set(matches) == {group.name for group in folded.groups}
    for group in folded.groups:
        assert sorted(matches[group.name].permutation.tolist()) == list(range(group.size))
        assert matches[group.name].cost <= matches[group.name].identity_cost + 1e-9
    orders = {n: m.permutation for n, m in matches.items()}
    permuted = graph.permute(theirs[0], orders)
    assert_same_function(model, theirs[0], permuted, x)


def covariance(rows: Tensor) -> Tensor:
    return torch.cov(rows.T, correction=0)


def augmented(rows: Tensor) -> Gram:
    rows = torch.cat([rows, torch.ones(len(rows), 1).double()], 1)
    return Gram.from_dense(rows.T @ rows / len(rows), len(rows))


def two_layers(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of two Linear layers, and inputs of each with a mean and correlations."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    state = {"0.weight": random(4, 3), "0.bias": random(4), "2.weight": random(2, 4)}
    inputs = {"0": random(30, 3) @ random(3, 3) + 2.0, "2": random(30, 4) @ random(4, 4) - 1.0}
    return state | {"2.bias": random(2)}, inputs


def two_layer_graph() -> ChannelGraph:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return ChannelGraph.trace(model, torch.zeros(1, 3))


def test_the_cost_is_that_of_the_outputs_and_of_the_readers_weights() -> None:
    """Writers by the correlation of outputs, readers by weights times the size of their inputs."""
    networks, graph = [two_layers(seed) for seed in (1, 2)], two_layer_graph()
    sides = [GramSide(s, {n: augmented(x) for n, x in xs.items()}) for s, xs in networks]
    cost, [group] = GramCost(*sides, graph), graph.groups
    writer, reader = cost.members(group)
    (ours, xs), (theirs, ys) = networks
    one, other = covariance(xs["0"]), covariance(ys["0"])
    a, b = ours["0.weight"], theirs["0.weight"]
    products = a @ (one + other) @ b.T / 2
    sizes = (a @ one * a).sum(1).sqrt()[:, None] * (b @ other * b).sum(1).sqrt()
    found = cost.between(group, writer, {group.name: torch.arange(4)})
    torch.testing.assert_close(found, 1 - (products / sizes).clamp(-1, 1))
    for order in (torch.arange(4), torch.tensor([2, 0, 3, 1])):  # as the report shows it
        pairs = float(1 - found[torch.arange(4), order].mean())
        assert cost.paired(group, writer, {group.name: order}) == pytest.approx(pairs)
    # A channel that is one input has one energy, which a cosine does not see.
    cosines = nn.functional.cosine_similarity(
        ours["2.weight"].T[:, None], theirs["2.weight"].T[None], dim=2
    )
    found = cost.between(group, reader, {group.name: torch.arange(4)})
    torch.testing.assert_close(found, 1 - cosines)


@pytest.mark.parametrize("behind", ["flatten", "convolution"])
def test_readers_count_weights_by_the_size_of_their_inputs(behind: str) -> None:
    """A channel is several inputs here, each with an energy of its own."""
    last = [nn.Flatten(), nn.Linear(8, 3)] if behind == "flatten" else [nn.Conv2d(4, 3, (1, 2))]
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), *last).double()
    graph, reader = ChannelGraph.trace(model, torch.zeros(1, 2, 1, 2).double()), f"{1 + len(last)}"
    sides, slices = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        randomise(model)
        inputs = torch.randn(30, 8).double() * torch.rand(8).double() + torch.rand(8).double()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        sides.append(GramSide(state, {reader: augmented(inputs)}))
        scaled = state[f"{reader}.weight"].flatten(1) * inputs.square().mean(0).sqrt()
        slices.append(scaled.view(3, 4, 2).transpose(0, 1).flatten(1))
    cost, [group] = GramCost(*sides, graph), graph.groups
    [member] = [m for m in cost.members(group) if m.role == "input"]
    cosines = nn.functional.cosine_similarity(slices[0][:, None], slices[1][None], dim=2)
    found = cost.between(group, member, {group.name: torch.arange(4)})
    torch.testing.assert_close(found, 1 - cosines)


def test_the_reference_is_the_mean_of_the_networks_before() -> None:
    """Of their products with the covariances of their inputs, and of the inputs' energies."""
    networks, reference = [two_layers(seed) for seed in (1, 2, 3)], Reference()
    for (state, inputs), weight in zip(networks, (1.0, 2.0, 5.0), strict=True):
        grams = {name: augmented(rows) for name, rows in inputs.items()}
        reference.add(state, grams, layer_outputs(state, grams), weight, frozenset())
    side = reference.side(networks[0][0])
    for layer in ("0", "2"):
        products = [s[f"{layer}.weight"] @ covariance(x[layer]) for s, x in networks]
        energies = [x[layer].square().mean(0) for _, x in networks]
        mean, energy = (
            sum(w * v for w, v in zip((1, 2, 5), values, strict=True)) / 8
            for values in (products, energies)
        )
        torch.testing.assert_close(side.products[f"{layer}.weight"], mean)
        torch.testing.assert_close(side.energies[f"{layer}.weight"], energy.sqrt())


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("coefficients", ["clients", "examples"])
def test_the_merge_is_that_of_the_stated_formulas(coefficients: str, alpha: float | None) -> None:
    """RegMean on shrunk Grams with biases, then repair; no channel moves here."""
    networks, stay = [two_layers(1), two_layers(2)], AlignmentOptions(scope="all", margin=0.999999)
    grams = [{n: augmented(x) for n, x in inputs.items()} for _, inputs in networks]
    updates = [
        Update(state, own, num_examples=examples, num_clients=clients)
        for (state, _), own, examples, clients in zip(networks, grams, (5, 2), (1, 3), strict=True)
    ]
    graph = two_layer_graph()
    merged = merge_apart(
        updates, graph, alignment=stay, coefficients=coefficients, ridge=0.1, alpha=alpha
    )
    assert merged.moved == 0
    gammas = (5.0, 2.0) if coefficients == "examples" else (1.0, 3.0)

    def summed(values: Iterable[Tensor]) -> Tensor:
        return sum(g * v for g, v in zip(gammas, values, strict=True))

    for layer, repaired in (("0", True), ("2", False)):
        own = [torch.cat([s[f"{layer}.weight"], s[f"{layer}.bias"][:, None]], 1)
               for s, _ in networks]  # fmt: skip
        dense = [g[layer].dense() for g in grams]
        trust = 30 / (30 + len(dense[0])) if alpha is None else alpha
        shrunk = [trust * g + (1 - trust) * g.diagonal().diag() for g in dense]
        total, mean = summed(shrunk), (5 * own[0] + 2 * own[1]) / 7
        shift = 0.1 * total.diagonal().mean() * torch.eye(len(total)).double()
        right = summed(m @ g for m, g in zip(own, shrunk, strict=True)) + mean @ shift
        wanted = torch.linalg.solve(total + shift, right.T).T
        if repaired:
            pooled = summed(dense) / sum(gammas)
            means = summed(m @ g[:, -1] for m, g in zip(own, dense, strict=True)) / sum(gammas)
            seconds = summed((m @ g * m).sum(1) for m, g in zip(own, dense, strict=True))
            before = wanted @ pooled[:, -1]
            variance = (wanted @ pooled * wanted).sum(1) - before.square()
            own_variance = seconds / sum(gammas) - means.square()
            scale = (own_variance / variance).sqrt().clamp(0.2, 5.0)
            assert not torch.allclose(scale, torch.ones(4).double(), atol=0.05)
            wanted = wanted * scale[:, None]
            wanted[:, -1] += means - before * scale
            shares = [float((k * variance).sum() / own_variance.sum()) for k in (1, scale.square())]
            quality = merged.report.quality[layer]
            assert [quality.variance_before, quality.variance_after] == pytest.approx(shares)
        torch.testing.assert_close(merged.state[f"{layer}.weight"], wanted[:, :-1])
        torch.testing.assert_close(merged.state[f"{layer}.bias"], wanted[:, -1])


@pytest.mark.parametrize("name", ["lenet5-bn", "separable"])
def test_it_makes_no_difference_which_network_is_the_reference(name: str) -> None:
    """Inputs of both networks count equally in the cost."""
    model, x, graph = network(name)
    networks = [other_weights(model, x * scale, seed) for seed, scale in ((1, 1.0), (2, 3.0))]
    one, other = (
        cost_between("gram", model, x, graph, *pair) for pair in (networks, networks[::-1])
    )
    folded = fold_graph(graph)
    orders = {group.name: torch.arange(group.size) for group in folded.groups}
    for group in folded.groups:
        for member in one.members(group):
            found, back = (cost.between(group, member, orders) for cost in (one, other))
            torch.testing.assert_close(found, back.T, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["gram", "profile"])
@settings(max_examples=20)
@given(seed=SEEDS)
def test_ties_go_to_the_identity(kind: str, seed: int) -> None:
    """All units are alike but for their scale, which rounds their costs: none moves."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    x = torch.randn(30, 3, dtype=torch.float64)
    graph = ChannelGraph.trace(model, (x,))
    updates = []
    for _ in range(2):
        scale = torch.rand(6, 1).double() + 0.5
        with torch.no_grad():
            model[0].weight.copy_(scale * torch.randn(1, 3).double())
            model[0].bias.copy_(scale[:, 0] * torch.rand(1).double())
            model[2].weight.copy_(torch.randn(2, 1).double() / scale.T)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        found = profiled(model, state, x, graph) if kind == "profile" else None
        updates.append(Update(state, measured(model, x), profiles=found))
    assert merge_apart(updates, graph).moved == 0


def test_an_order_must_gain_the_margin() -> None:
    model, x, graph = network("lenet5")
    networks = [Update(*other_weights(model, x, seed)) for seed in (1, 2)]
    assert merge_apart(networks, graph).moved > 0
    strict = AlignmentOptions("exact", "all", margin=0.999999)
    assert merge_apart(networks, graph, alignment=strict).moved == 0


@pytest.mark.parametrize("kind", ["gram", "profile"])
def test_dead_and_constant_units_are_safe(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    ).double()
    model.eval()
    x = torch.randn(20, 2, 8, 8, dtype=torch.float64)
    graph = ChannelGraph.trace(model, (x,))
    updates = []
    for dead in (0, 3):
        randomise(model)
        with torch.no_grad():
            model[0].weight[dead] = 0.0  # constant before the ReLU
            model[1].bias[dead + 1] = -100.0  # never behind it
            model[1].weight[dead + 2] = 0.0
            model[3].weight[dead % 4] = 0.0
            model[3].bias[dead % 4] = 0.0
        state = {k: v.clone() for k, v in model.state_dict().items()}
        found = profiled(model, state, x, graph) if kind == "profile" else None
        updates.append(Update(state, measured(model, x), profiles=found))
    merged = merge_apart(updates, graph)
    assert all(bool(torch.isfinite(value).all()) for value in merged.state.values())
    assert all(math.isfinite(q.variance_after) for q in merged.report.quality.values())


@settings(max_examples=30)
@given(seed=SEEDS, dead=st.integers(0, 4), shrink=st.floats(0.0, 3.0))
def test_repair_restores_the_moments_and_never_yields_a_nan(
    seed: int, dead: int, shrink: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    rows[:, -1] = 1.0
    gram = Gram.from_dense(rows.T @ rows / 40, 40)
    state = {
        "l.weight": torch.randn(5, 5, generator=generator, dtype=torch.float64),
        "l.bias": torch.randn(5, generator=generator, dtype=torch.float64),
    }
    state["l.weight"][:dead] = 0.0
    wanted = layer_moments(state, "l", gram)
    weak = {"l.weight": state["l.weight"] * shrink, "l.bias": state["l.bias"] + 1.0}
    repair_layer(weak, "l", gram, wanted)
    assert all(bool(torch.isfinite(value).all()) for value in weak.values())
    if 0.2 <= shrink:  # within what a repair may undo
        torch.testing.assert_close(weak["l.weight"], state["l.weight"], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(weak["l.bias"], state["l.bias"], rtol=1e-6, atol=1e-6)
    found = layer_moments(weak, "l", gram)
    torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-6, atol=1e-6)


def test_repair_does_nothing_where_nothing_shrank_and_is_bounded() -> None:
    gram = Gram.from_dense(torch.eye(3, dtype=torch.float64), 9)
    state = {"l.weight": torch.eye(2, dtype=torch.float64), "l.bias": torch.zeros(2).double()}
    before = {name: value.clone() for name, value in state.items()}
    repair_layer(state, "l", gram, layer_moments(state, "l", gram))
    assert all(torch.equal(state[name], before[name]) for name in state)
    huge = Moments(torch.zeros(2).double(), torch.full((2,), 1e9).double())
    repair_layer(state, "l", gram, huge)
    torch.testing.assert_close(state["l.weight"], before["l.weight"] * 5.0)


def test_a_unit_that_varies_by_rounding_alone_is_shifted_and_not_scaled() -> None:
    """Its inputs are constant, in 50 units with 50 rounding errors of their variance."""
    torch.manual_seed(0)
    rows = torch.cat([1000.0 * torch.rand(1, 4).double().expand(30, 4), torch.ones(30, 1)], 1)
    gram = Gram.from_dense(rows.T @ rows / 30, 30)
    state = {"l.weight": torch.randn(50, 4).double(), "l.bias": torch.randn(50).double()}
    before = state["l.weight"].clone()
    matrix = torch.cat([before, state["l.bias"][:, None]], 1)
    second = (matrix @ gram.dense() * matrix).sum(1)
    assert bool((second - (matrix @ gram.dense()[:, -1]).square() > 0).any())  # only by rounding
    repair_layer(state, "l", gram, Moments(torch.zeros(50).double(), torch.ones(50).double()))
    assert torch.equal(state["l.weight"], before)
    torch.testing.assert_close(layer_moments(state, "l", gram).mean, torch.zeros(50).double(),
                               rtol=0, atol=1e-8)  # fmt: skip


def test_the_outputs_of_the_network_are_not_repaired() -> None:
    """Their spread is the networks' confidence, which differs where the networks disagree."""
    model, x, graph = network("lenet5")
    networks = [Update(*other_weights(model, x, seed)) for seed in (1, 2)]
    merged, plain = (merge_apart(networks, graph, repair=repair).state for repair in (True, False))
    assert torch.equal(merged["fc3.weight"], plain["fc3.weight"])
    assert torch.equal(merged["fc3.bias"], plain["fc3.bias"])
    assert not torch.allclose(merged["fc2.weight"], plain["fc2.weight"])


def test_a_layer_without_the_gram_of_one_network_is_averaged_and_named() -> None:
    model, x, graph = network("lenet5-bn")
    first, second = other_weights(model, x, 1), other_weights(model, x, 2)
    del second[1]["fc1"]
    with pytest.warns(UserWarning, match="fc1"):
        merged = merge_apart([Update(*first), Update(*second)], graph)
    assert merged.report.layers["fc1"].how == "averaged"
    assert "fc1" not in merged.report.quality
    assert merged.report.layers["conv2"].how == "regmean"
    assert all(bool(torch.isfinite(value).all()) for value in merged.state.values())


def test_a_norm_that_is_no_part_of_a_layer_is_reported() -> None:
    model, x, graph = network("concat")
    networks = [Update(*other_weights(model, x, seed)) for seed in (1, 2)]
    merged = merge_apart(networks, graph)
    assert set(merged.report.lone_norms) == {"norm"}
    assert merged.report.to_dict()["quality"]["second"]["variance_after"] > 0


def test_networks_of_another_shape_or_name_are_refused() -> None:
    model, x, graph = network("lenet5")
    state, grams = other_weights(model, x, 1)
    other = {**state, "fc3.bias": torch.zeros(3)}
    with pytest.raises(ValueError, match="fc3.bias"):
        merge_apart([Update(state, grams), Update(other, grams)], graph)
    with pytest.raises(ValueError, match="two updates are named"):
        merge_apart([Update(state, name="a"), Update(state, name="a")], graph)
    with pytest.raises(ValueError, match="empty"):
        merge_apart([], graph)


def test_a_unit_that_varies_by_rounding_alone_counts_as_constant() -> None:
    """Half of the units read inputs that are constant: their correlations would be noise."""
    torch.manual_seed(0)
    constant = 10.0 * torch.rand(1, 4).double().expand(40, 4)
    rows = torch.cat([torch.randn(40, 4).double(), constant, torch.ones(40, 1).double()], 1)
    weight = torch.randn(40, 8).double()
    weight[20:, :4] = 0.0
    side = GramSide({"l.weight": weight}, {"l": Gram.from_dense(rows.T @ rows / 40, 40)})
    noise = (side.products["l.weight"] * weight).sum(1)[20:]
    assert bool((noise > 0).any())
    variances = side.variances["l.weight"]
    assert bool((variances[:20] > 0).all()) and not variances[20:].any()


def test_what_is_dead_resembles_only_what_is_dead() -> None:
    cost = dissimilarity(torch.ones(2, 2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    assert cost.tolist() == [[1.0, 0.0], [0.0, 1.0]]
