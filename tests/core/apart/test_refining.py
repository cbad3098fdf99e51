"""Fitting a merged network's layers to their inputs: optimal, harmless where nothing is amiss."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import build, output, randomise
from torch import Tensor, nn

from hfedatm_core import (
    Answers,
    ChannelGraph,
    Merged,
    OwnedNetwork,
    Update,
    collect_answers,
    collect_grams,
    fit_layers,
    merge_apart,
    refine,
)
from hfedatm_core.apart.folding import fold
from hfedatm_core.grams.layer_moments import layer_matrix

NETS = ("lenet5-bn", "residual", "separable", "concat", "channels-last")
State = dict[str, Tensor]


@cache  # tracing takes longer than all that is tested
def network(name: str) -> tuple[nn.Module, Tensor, ChannelGraph]:
    model, x = build(name)
    x = torch.randn(16, *x.shape[1:], dtype=torch.float64)
    return model.eval(), x, ChannelGraph.trace(model, (x[:2],))


def weights(model: nn.Module, seed: int) -> State:
    torch.manual_seed(seed)
    randomise(model)
    return {k: v.clone() for k, v in model.state_dict().items()}


def merged_of(
    model: nn.Module, graph: ChannelGraph, states: dict[str, State], data: dict[str, Tensor]
) -> tuple[Merged, dict[str, OwnedNetwork]]:
    updates, parts = [], {}
    for name, state in states.items():
        model.load_state_dict(state)
        batches = [(part, None) for part in data[name].split(5)]
        updates.append(Update(state, collect_grams(model, batches, full=True), name=name))
        parts[name] = OwnedNetwork(state, batches)
    return merge_apart(updates, graph), parts


def answers_of(name: str, seed: int = 0) -> tuple[Answers, State, ChannelGraph]:
    """Return what an owner measures whose network is the merged one."""
    model, x, graph = network(name)
    state = weights(model, seed)
    return collect_answers(model, model, graph, [(x[:9], None), (x[9:], None)]), state, graph


@pytest.mark.parametrize("name", NETS)
def test_answers_about_the_same_network_say_what_its_layers_compute(name: str) -> None:
    answers, state, graph = answers_of(name)
    folded = fold(state, graph)
    assert answers.residuals.keys() == answers.grams.keys() == answers.moments.keys()
    assert f"{next(iter(answers.residuals))}.weight" in state
    for layer, (mean, second, error) in answers.moments.items():
        matrix = layer_matrix(folded, layer).double()
        product = torch.zeros_like(matrix)
        answers.grams[layer].add_product(product, matrix.contiguous())
        torch.testing.assert_close(mean, product[:, -1], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(second, (product * matrix).sum(1), rtol=1e-8, atol=1e-8)
        assert not error.any() and not answers.residuals[layer].any()


@pytest.mark.parametrize("name", NETS)
def test_residuals_say_by_how_much_a_layer_differs(name: str) -> None:
    """One layer of the owner's network differs, so its inputs are those of the merged network."""
    model, x, graph = network(name)
    state, (own, _) = weights(model, 0), build(name)
    layers = list(collect_answers(model, model, graph, [(x, None)]).residuals)
    for layer in layers:
        other = {**state, f"{layer}.weight": state[f"{layer}.weight"] * 1.5 + 0.1}
        own.load_state_dict(other)
        answers = collect_answers(model, own, graph, [(x[:9], None), (x[9:], None)], [layer])
        change = layer_matrix(fold(other, graph), layer) - layer_matrix(fold(state, graph), layer)
        expected = torch.zeros_like(change, dtype=torch.float64)
        answers.grams[layer].add_product(expected, change.double().contiguous())
        torch.testing.assert_close(answers.residuals[layer], expected, rtol=1e-7, atol=1e-8)
        error = (expected * change).sum(1)
        torch.testing.assert_close(answers.moments[layer][2], error, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", NETS)
def test_permuted_copies_are_a_fixed_point_whatever_their_data(name: str) -> None:
    model, x, graph = network(name)
    state = weights(model, 3)
    generator = torch.Generator().manual_seed(1)
    shuffle = {g.name: torch.randperm(g.size, generator=generator) for g in graph.groups}
    states = {"a": state, "b": graph.permute(state, shuffle)}
    merged, parts = merged_of(model, graph, states, {"a": x, "b": x})
    other = OwnedNetwork(parts["b"].state, [(x * 2 - 1, None)])
    found = refine(merged, model, {"a": parts["a"], "b": other})
    expected = output(model, state, x)
    torch.testing.assert_close(output(model, found, x), expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16), owners=st.integers(1, 3))
def test_the_last_layer_is_the_least_squares_solution(seed: int, owners: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    graph = ChannelGraph.trace(model, (torch.zeros(1, 3, dtype=torch.float64),))
    state = {n: draw(*v.shape) for n, v in model.state_dict().items()}
    model.load_state_dict(state)
    answers, inputs, wanted = [], [], []
    for _ in range(owners):
        own = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
        own.load_state_dict({n: draw(*v.shape) for n, v in state.items()})
        x = draw(30, 3)
        answers.append(collect_answers(model, own, graph, [(x, None)], ["2"]))
        with torch.no_grad():
            inputs.append(torch.cat([model[:2](x), x.new_ones(30, 1)], 1))
            wanted.append(own(x))
    found = fit_layers(state, graph, answers, ridge=1e-12)
    u, y = torch.cat(inputs), torch.cat(wanted)

    def error(state: State) -> float:
        matrix = torch.cat([state["2.weight"], state["2.bias"][:, None]], 1)
        return float((u @ matrix.T - y).square().sum())

    best = float((u @ torch.linalg.lstsq(u, y, driver="gelsd").solution - y).square().sum())
    assert best <= error(found) + 1e-9 <= best * (1 + 1e-5) + 1e-6
    assert all(torch.equal(found[n], state[n]) for n in ("0.weight", "0.bias"))  # not measured


def test_refining_brings_the_outputs_nearer_to_those_of_the_networks() -> None:
    model, x, graph = network("separable")
    states = {"a": weights(model, 1), "b": weights(model, 2)}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, *x.shape[1:], generator=generator, dtype=torch.float64)
    merged, parts = merged_of(model, graph, states, {"a": x[:40], "b": x[40:80]})

    def wasted(state: State, x: Tensor) -> float:
        """Return how much further the outputs are from the networks' than the networks' mean is."""
        wanted = [output(model, part.state, x) for part in parts.values()]
        mean, found = torch.stack(wanted).mean(0), output(model, state, x)
        return sum(float((found - y).square().sum() - (mean - y).square().sum()) for y in wanted)

    found = refine(merged, model, parts)
    for some in (x[:80], x[80:]):  # and what the fit has not seen
        assert wasted(found, some) < 0.5 * wasted(merged.state, some)


@pytest.mark.parametrize("name", NETS)
def test_layers_that_nobody_measured_stay_as_they_are(name: str) -> None:
    answers, state, graph = answers_of(name)
    layer = list(answers.residuals)[-1]
    one = Answers(
        *({layer: part[layer]} for part in (answers.grams, answers.residuals, answers.moments))
    )
    for given_answers in ([answers, one], [one, answers]):
        found = fit_layers(state, graph, given_answers)
        behind = {norm.name for norm in graph.norms if norm.layer == layer} | {layer}
        for key, value in state.items():
            if key.rpartition(".")[0] not in behind:
                assert torch.equal(found[key], value), key


def test_dead_and_constant_units_are_safe() -> None:
    model, x, graph = network("separable")
    states = {}
    for seed, name in enumerate("ab"):
        state = weights(model, seed)
        for key, value in state.items():
            if key.endswith("weight") and value.dim() > 1:
                value[seed] = 0.0
        states[name] = state
    merged, parts = merged_of(model, graph, states, {"a": x, "b": torch.zeros_like(x)})
    found = refine(merged, model, parts)
    assert all(bool(torch.isfinite(value).all()) for value in found.values())


class Tokens(nn.Module):
    """One layer that reads tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, attention_mask: Tensor) -> Tensor:
        return (self.read(inputs) * attention_mask[..., None]).sum(1)


def test_padding_does_not_count() -> None:
    torch.manual_seed(0)
    merged, own = Tokens().double(), Tokens().double()
    x, mask = torch.randn(4, 5, 3, dtype=torch.float64), torch.ones(4, 5)
    mask[:, 3:] = 0
    graph = ChannelGraph()
    short = collect_answers(
        *(merged, own, graph),
        [({"inputs": x[:, :3], "attention_mask": mask[:, :3]}, None)],
    )
    x[:, 3:] = 1e6
    padded = collect_answers(merged, own, graph, [({"inputs": x, "attention_mask": mask}, None)])
    torch.testing.assert_close(padded.residuals["read"], short.residuals["read"])
    torch.testing.assert_close(padded.moments["read"], short.moments["read"])
    torch.testing.assert_close(padded.grams["read"].dense(), short.grams["read"].dense())


def test_modes_and_hooks_are_as_before_also_after_an_error() -> None:
    model, x, graph = network("lenet5-bn")
    own, _ = build("lenet5-bn")
    model.train()
    try:
        with pytest.raises(RuntimeError):
            collect_answers(model, own.eval(), graph, [(x[:, :1, :3], None)])
        assert model.training and not own.training
        hooks = [
            m._forward_hooks or m._forward_pre_hooks for m in (*model.modules(), *own.modules())
        ]
        assert not any(hooks)
    finally:
        model.eval()


def test_mistakes_are_named() -> None:
    model, x, graph = network("lenet5-bn")
    states = {"a": weights(model, 1), "b": weights(model, 2)}
    merged, parts = merged_of(model, graph, states, {"a": x, "b": x})
    with pytest.raises(ValueError, match="differ: b"):
        refine(merged, model, {"a": parts["a"]})
    with pytest.raises(ValueError, match="measure: nothing"):
        collect_answers(model, model, graph, [(x, None)], ["nothing"])
    with pytest.raises(ValueError, match="no answers"):
        fit_layers(merged.state, graph, [])
    answers = collect_answers(model, model, graph, [(x, None)], ["fc1"])
    short = Answers(answers.grams, {"fc1": answers.residuals["fc1"][1:]}, answers.moments)
    with pytest.raises(ValueError, match="fc1"):
        fit_layers(merged.state, graph, [short])
