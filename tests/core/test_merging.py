"""Merging stations: permuted copies, ablations, reports, references, bad updates."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hfedatm_core import (
    AlignmentOptions,
    ChannelGraph,
    FactorGram,
    Gram,
    Update,
    align,
    collect_grams,
    forward,
    merge,
    regmean,
    weighted_mean,
)

LINEAR = ("8", "10", "12")
EXACT, EVERYTHING = AlignmentOptions(solver="exact"), AlignmentOptions(scope="all")


def lenet(seed: int = 0, kernel: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 6, kernel, padding=kernel // 2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, kernel, padding=kernel // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 4, 12),
        nn.ReLU(),
        nn.Linear(12, 10),
        nn.ReLU(),
        nn.Linear(10, 3),
    ).double()
    for tensor in model[1].state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    return model.eval()


X = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
GRAPH = ChannelGraph.trace(lenet(), (X,))


def batches(seed: int, count: int = 40):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64), None)]


def permutations(seed: int, kinds=("conv", "linear")) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        group.name: torch.randperm(group.size, generator=generator)
        for group in GRAPH.groups
        if group.kind in kinds
    }


def permuted(update: Update, moves, grams: bool = True) -> Update:
    """Reorder a network's channels, and its Grams with them (or not)."""
    state = {}
    for key, tensor in update.state.items():
        for axis, length in enumerate(tensor.shape):
            index = GRAPH.index(key, axis, length, moves)
            tensor = tensor if index is None else tensor.index_select(axis, index)
        state[key] = tensor
    moved = dict(update.grams)
    for layer, gram in update.grams.items():
        index = GRAPH.index(f"{layer}.weight", 1, gram.dim, moves)
        if grams and index is not None:
            moved[layer] = gram.permute(index)
    return Update(state, moved, update.num_examples, update.num_clients, update.name)


def specialists(count: int, seed: int = 0, factored: bool = False) -> list[Update]:
    """Copies of one network, each wrong only where its own inputs have no support.

    With the right Grams RegMean recovers the network exactly; with wrong ones it cannot.
    """
    generator = torch.Generator().manual_seed(seed)
    updates = []
    for number in range(count):
        state = {key: value.clone() for key, value in lenet().state_dict().items()}
        grams = {}
        for layer in LINEAR:
            weight = state[f"{layer}.weight"]
            d = weight.shape[1]
            rows = torch.randn(d // 2 + 1, d, generator=generator, dtype=torch.float64)
            error = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            error -= torch.linalg.lstsq(rows.T, error.T).solution.T @ rows
            weight += 0.03 * error
            scaled = rows / len(rows) ** 0.5
            grams[layer] = (
                FactorGram(scaled, rows=len(rows))
                if factored
                else Gram.from_dense(scaled.T @ scaled, len(rows))
            )
        updates.append(Update(state, grams, 10 + number, 1 + number, f"station-{number}"))
    return updates


def distance(a, b) -> float:
    return max(float((a[key].double() - b[key].double()).abs().max()) for key in b)


BASE = lenet().state_dict()


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("solver", ["exact", "sinkhorn"])
@settings(max_examples=8)
@given(seed=st.integers(0, 999), count=st.integers(4, 6))
def test_permuted_copies_with_their_grams_merge_back(seed, count, solver, factored):
    updates = specialists(count, seed, factored)
    shuffled = [updates[0]] + [
        permuted(u, permutations(seed + i)) for i, u in enumerate(updates[1:])
    ]
    merged = merge(
        shuffled, GRAPH, alignment=AlignmentOptions(solver=solver, scope="all"), ridge=1e-13
    )
    assert distance(merged.state, BASE) <= 1e-8
    assert distance(weighted_mean([u.state for u in updates], [1] * count), BASE) > 1e-3
    for i, name in enumerate(f"station-{k}" for k in range(1, count)):
        for group, found in merged.permutations[name].items():
            applied = permutations(seed + i)[group]
            assert torch.equal(applied[found], torch.arange(len(found)))


def test_permuted_conv_channels_merge_back_with_scope_conv():
    updates = specialists(4)
    shuffled = [updates[0]] + [
        permuted(u, permutations(i, kinds=("conv",))) for i, u in enumerate(updates[1:])
    ]
    merged = merge(shuffled, GRAPH, alignment=AlignmentOptions(scope="conv"), ridge=1e-13)
    assert distance(merged.state, BASE) <= 1e-8


@pytest.mark.parametrize("scope", ["conv", "all"])
def test_permuting_the_weights_but_not_the_grams_does_not_merge_back(scope):
    kinds = ("conv",) if scope == "conv" else ("conv", "linear")
    updates = specialists(4)
    shuffled = [updates[0]] + [
        permuted(u, permutations(i, kinds), grams=False) for i, u in enumerate(updates[1:])
    ]
    assert (
        distance(
            merge(shuffled, GRAPH, alignment=AlignmentOptions(scope=scope), ridge=1e-13).state, BASE
        )
        > 1e-3
    )


def test_plain_permuted_copies_with_collected_grams_compute_the_same():
    model = lenet()
    copies = []
    for i in range(3):
        update = Update(model.state_dict(), collect_grams(model, batches(i)), name=f"s{i}")
        copies.append(permuted(update, permutations(i) if i else {}))
    merged = merge(copies, GRAPH, alignment=EVERYTHING)
    model.load_state_dict(merged.state)
    torch.testing.assert_close(forward(model, X), forward(lenet(), X), rtol=0, atol=1e-8)


def different_stations(count: int = 3) -> list[Update]:
    updates = []
    for i in range(count):
        model = lenet(i)
        grams = {k: g.shrink(0.75) for k, g in collect_grams(model, batches(i)).items()}
        updates.append(Update(model.state_dict(), grams, 10 * (i + 1), i + 1, f"station-{i}"))
    return updates


def test_without_fot_and_regmean_it_is_the_mean_by_examples():
    updates = different_stations()
    merged = merge(updates, fot=False, regmean=False)
    wanted = weighted_mean([u.state for u in updates], [10, 20, 30])
    assert all(torch.equal(merged.state[key], value) for key, value in wanted.items())
    assert {entry.how for entry in merged.report.layers.values()} == {"averaged"}
    assert merged.permutations == {u.name: {} for u in updates}


@pytest.mark.parametrize(
    ("coefficients", "gammas"), [("clients", [1, 2, 3]), ("examples", [1, 2, 3])]
)
def test_without_fot_linear_layers_are_merged_by_regmean_alone(coefficients, gammas):
    updates = different_stations()
    merged = merge(updates, fot=False, coefficients=coefficients)
    mean = weighted_mean([u.state for u in updates], [10, 20, 30])
    for key in BASE:
        layer = key.removesuffix(".weight")
        if layer in LINEAR:
            weights, grams = [u.state[key] for u in updates], [u.grams[layer] for u in updates]
            torch.testing.assert_close(merged.state[key], regmean(weights, grams, gammas))
            assert merged.report.layers[layer].how == "regmean"
        else:
            assert torch.equal(merged.state[key], mean[key])


def test_gamma_is_clients_or_examples():
    updates = different_stations()
    odd = [Update(u.state, u.grams, u.num_examples, 5 - i, u.name) for i, u in enumerate(updates)]
    clients, examples = merge(odd, fot=False), merge(odd, fot=False, coefficients="examples")
    weights, grams = [u.state["10.weight"] for u in odd], [u.grams["10"] for u in odd]
    gammas = [[5, 4, 3], [10, 20, 30]]
    for merged, gamma in zip((clients, examples), gammas, strict=True):
        # The ridge pulls to the mean by examples, hence not equal to the last digit.
        torch.testing.assert_close(
            merged.state["10.weight"], regmean(weights, grams, gamma), rtol=0, atol=1e-4
        )
    assert distance(clients.state, examples.state) > 1e-3


def test_a_large_ridge_is_merging_without_regmean():
    updates = different_stations()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ridged = merge(updates, GRAPH, ridge=1e12)
    assert distance(ridged.state, merge(updates, GRAPH, regmean=False).state) < 1e-8


def test_the_report_is_plain_data_per_station_group_and_layer():
    updates = different_stations()
    report = merge(updates, GRAPH, alignment=EVERYTHING).report
    data = json.loads(json.dumps(report.to_dict()))
    assert data["reference"] == "station-0"
    assert set(data["stations"]) == {"station-0", "station-1", "station-2"}
    assert set(data["stations"]["station-1"]) == {group.name for group in GRAPH.groups}
    for entry in data["stations"]["station-1"].values():
        assert entry["moved"] > 0 and 0 <= entry["cost"] < entry["identity_cost"]
    assert all(entry["moved"] == 0 for entry in data["stations"]["station-0"].values())
    assert data["layers"]["0"] == {"how": "averaged", "reason": "no station sent a Gram"}
    assert data["layers"]["12"]["how"] == "regmean"


def test_an_exact_bias_comes_with_the_augmented_gram():
    updates = []
    for i in range(3):
        model = lenet(i)
        updates.append(Update(model.state_dict(), collect_grams(model, batches(i), bias=True)))
    merged = merge(updates, fot=False)
    both = [torch.cat([u.state["12.weight"], u.state["12.bias"][:, None]], 1) for u in updates]
    wanted = regmean(both, [u.grams["12"] for u in updates])
    torch.testing.assert_close(merged.state["12.weight"], wanted[:, :-1])
    torch.testing.assert_close(merged.state["12.bias"], wanted[:, -1])
    # and the constant feature survives alignment
    shuffled = [updates[0]] + [permuted_augmented(u, i) for i, u in enumerate(updates[1:])]
    plain = merge(updates, GRAPH, alignment=replace(EXACT, scope="all"))
    again = merge(shuffled, GRAPH, alignment=replace(EXACT, scope="all"))
    assert distance(again.state, plain.state) < 1e-8


def permuted_augmented(update: Update, seed: int) -> Update:
    moves = permutations(seed)
    grams = {}
    for layer, gram in update.grams.items():
        index = GRAPH.index(f"{layer}.weight", 1, gram.dim - 1, moves)
        grams[layer] = gram if index is None else gram.permute(index)
    return Update(permuted(Update(update.state), moves).state, grams)


def test_convolutions_by_regmean():
    updates = []
    for i in range(3):
        model = lenet(i)
        updates.append(Update(model.state_dict(), collect_grams(model, batches(i), conv=True)))
    merged = merge(updates, fot=False)
    weights = [u.state["4.weight"].flatten(1) for u in updates]
    wanted = regmean(weights, [u.grams["4"] for u in updates])
    torch.testing.assert_close(merged.state["4.weight"].flatten(1), wanted)
    assert merged.report.layers["4"].how == "regmean"
    model = lenet()
    model.load_state_dict(merged.state)
    # Alignment undoes a permutation of channels also for the patches of a convolution.
    shuffled = list(updates)
    for i in (1, 2):
        moves = permutations(i, kinds=("conv",))
        grams = {}
        for layer, gram in updates[i].grams.items():
            weight = updates[i].state[f"{layer}.weight"]
            index = GRAPH.index(f"{layer}.weight", 1, weight.shape[1], moves)
            grams[layer] = gram if index is None else gram.permute(index)
        shuffled[i] = Update(permuted(Update(updates[i].state), moves).state, grams)
    aligned = [merge(u, GRAPH, alignment=EXACT).state for u in (updates, shuffled)]
    assert distance(*aligned) < 1e-8


def test_a_convolution_and_its_bias_are_merged_by_least_squares():
    models = [lenet(i) for i in range(3)]
    grams = [collect_grams(m, batches(i), conv=True, bias=True) for i, m in enumerate(models)]
    updates = [Update(m.state_dict(), g) for m, g in zip(models, grams, strict=True)]
    merged = merge(updates, fot=False, ridge=1e-12).state
    # Of all kernels and biases these give the outputs of the stations on their own inputs best.
    weight, bias = (merged[f"0.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
    error = sum(
        ((nn.functional.conv2d(x, weight, bias, padding=1) - model[0](x)) ** 2).mean()
        for i, model in enumerate(models)
        for x, _ in batches(i)
    )
    error.backward()
    assert max(float(weight.grad.abs().max()), float(bias.grad.abs().max())) < 1e-8
    assert not torch.allclose(merged["0.bias"], sum(m[0].bias for m in models) / 3)


def test_kernels_of_another_size_are_resized_to_the_reference():
    small, large = lenet(0, kernel=3), lenet(1, kernel=5)
    updates = [
        Update(m.state_dict(), collect_grams(m, batches(i), conv=True), name=f"k{i}")
        for i, m in enumerate((small, large))
    ]
    with pytest.warns(UserWarning, match="k1 has another form or size") as caught:
        merged = merge(updates, GRAPH)
    assert sorted(str(w.message).split("'")[1] for w in caught) == ["0", "4"]
    lenet(0, kernel=3).load_state_dict(merged.state)
    assert merged.report.layers["12"].how == "regmean"
    with pytest.raises(ValueError, match=r"k1.*0\.weight.*\(6, 1, 5, 5\).*\(6, 1, 3, 3\)"):
        merge(updates, fot=False)


def test_reference_previous_and_medoid():
    updates = different_stations(4)
    previous = lenet(7).state_dict()
    merged = merge(updates, GRAPH, reference="previous", previous=previous, alignment=EXACT)
    assert merged.report.reference == "previous"
    assert all(any(e.moved for e in s.values()) for s in merged.report.stations.values())
    with pytest.raises(ValueError, match="previous=state"):
        merge(updates, GRAPH, reference="previous")

    def summed_cost(reference: Update) -> float:
        others = [u for u in updates if u is not reference]
        aligned = [align(u.state, reference.state, GRAPH, options=EXACT) for u in others]
        return sum(sum(a.cost.values()) for a in aligned)

    medoid = min(updates, key=summed_cost)
    assert medoid is not updates[0]  # else the test would not tell it from "first"
    for source in (updates, lambda: iter(updates)):
        found = merge(source, GRAPH, reference="medoid", alignment=EXACT)
        assert found.report.reference == medoid.name
        assert all(entry.moved == 0 for entry in found.report.stations[medoid.name].values())
    with pytest.raises(ValueError, match="several times"):
        merge(iter(updates), GRAPH, reference="medoid")


def test_an_iterator_is_read_once_and_gives_the_same():
    updates = different_stations()
    listed, streamed = merge(updates, GRAPH), merge(iter(updates), GRAPH)
    assert distance(listed.state, streamed.state) == 0.0


def test_a_layer_without_gram_in_one_station_is_averaged_with_the_reason():
    updates = different_stations()
    grams = {k: g for k, g in updates[1].grams.items() if k != "10"}
    for position, missing in ((1, "station-1"), (0, "station-1")):
        some = [u for u in updates if u.name != "station-1"]
        some.insert(position, Update(updates[1].state, grams, 20, 2, "station-1"))
        with pytest.warns(UserWarning, match=f"layer '10' is averaged: no Gram from {missing}"):
            merged = merge(some, fot=False)
        assert merged.report.layers["10"].how == "averaged"
        assert merged.report.layers["8"].how == "regmean"
        mean = weighted_mean([u.state for u in some], [u.num_examples for u in some])
        assert torch.equal(merged.state["10.weight"], mean["10.weight"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gram_that_is_not_finite_never_reaches_the_model(value):
    updates = different_stations()
    bad = dict(updates[2].grams)
    bad["8"] = Gram.from_dense(torch.full((32, 32), value, dtype=torch.float64))
    updates[2] = Update(updates[2].state, bad, 30, 3, "station-2")
    with pytest.warns(UserWarning, match="'8' is averaged: the Gram from station-2 is not finite"):
        merged = merge(updates, GRAPH)
    assert all(torch.isfinite(value).all() for value in merged.state.values())
    assert merged.report.layers["8"].how == "averaged"


def test_an_indefinite_gram_is_repaired_and_reported():
    updates = different_stations()
    for i, update in enumerate(updates):
        bad = dict(update.grams)
        shift = 0.9 * bad["8"].diagonal().mean() * torch.eye(32, dtype=torch.float64)
        bad["8"] = Gram.from_dense(bad["8"].dense() - shift)
        assert torch.linalg.eigvalsh(bad["8"].dense()).min() < 0
        updates[i] = Update(update.state, bad, 10, 1, update.name)
    merged = merge(updates, fot=False)
    assert all(torch.isfinite(value).all() for value in merged.state.values())
    assert merged.report.layers["8"].how == "regmean"
    assert "repaired" in merged.report.layers["8"].reason
    spread = torch.stack([u.state["8.weight"] for u in updates]).abs().max()
    assert merged.state["8.weight"].abs().max() < 50 * spread


def test_tied_weights_stay_tied():
    updates = []
    for i in range(3):
        torch.manual_seed(i)
        table = torch.randn(7, 4, dtype=torch.float64)
        other = torch.randn(7, 4, dtype=torch.float64)
        rows = torch.randn(9, 4, dtype=torch.float64)
        gram = Gram.from_dense(rows.T @ rows / 9, 9)
        state = {"embed.weight": table, "head.weight": table.clone(), "free.weight": other}
        updates.append(Update(state, {"head": gram, "free": gram}))
    merged = merge(updates, fot=False)
    assert torch.equal(merged.state["embed.weight"], merged.state["head.weight"])
    assert merged.report.layers["head"].how == "averaged"
    assert "tied to 'embed.weight'" in merged.report.layers["head"].reason
    wanted = regmean([u.state["free.weight"] for u in updates], [u.grams["free"] for u in updates])
    torch.testing.assert_close(merged.state["free.weight"], wanted)


def test_layers_that_share_a_gram_in_some_stations_only():
    updates = []
    for i in range(3):
        torch.manual_seed(i)
        rows = [torch.randn(9, 4, dtype=torch.float64) for _ in range(2)]
        a, b = (Gram.from_dense(r.T @ r / 9, 9) for r in rows)
        state = {f"{n}.weight": torch.randn(5, 4, dtype=torch.float64) for n in "qk"}
        updates.append(Update(state, {"q": a, "k": b if i == 1 else a}))
    merged = merge(updates, fot=False)
    for n in "qk":
        wanted = regmean([u.state[f"{n}.weight"] for u in updates], [u.grams[n] for u in updates])
        torch.testing.assert_close(merged.state[f"{n}.weight"], wanted)


def test_integer_buffers_keep_their_type():
    updates = different_stations()
    for i, update in enumerate(updates):
        update.state["1.num_batches_tracked"].fill_(10 * i)
    merged = merge(updates, GRAPH).state["1.num_batches_tracked"]
    assert merged.dtype == torch.int64 and int(merged) == round((20 * 10 + 30 * 20) / 60)


@pytest.mark.parametrize("fot", [True, False])
def test_bad_updates_are_named(fot):
    good = different_stations(2)

    def second(state=None, grams=None, name="clinic", **size):
        update = Update(
            good[1].state | (state or {}), good[1].grams | (grams or {}), name=name, **size
        )
        return merge([good[0], update], GRAPH, fot=fot)

    with pytest.raises(ValueError, match=r"clinic.*10\.weight.*\(10, 13\).*\(10, 12\)"):
        second({"10.weight": torch.zeros(10, 13)})
    with pytest.raises(ValueError, match=r"clinic.*8\.bias.*(NaN|infin)"):
        second({"8.bias": torch.full((12,), float("nan"))})
    with pytest.raises(ValueError, match=r"clinic.*more"):
        second({"more": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"clinic.*10.*5.*\(10, 12\)"):
        second(grams={"10": Gram.from_dense(torch.eye(5))})
    with pytest.raises(ValueError, match="clinic.*nowhere"):
        second(grams={"nowhere": Gram.from_dense(torch.eye(5))})
    with pytest.raises(ValueError, match="clinic.*weight"):
        second(num_examples=-1)
    with pytest.raises(ValueError, match="two updates are named 'station-0'"):
        second(name="station-0")
    with pytest.raises(ValueError, match=r"clinic.*8\.bias"):
        short = {k: v for k, v in good[1].state.items() if k != "8.bias"}
        merge([good[0], Update(short, name="clinic")], GRAPH, fot=fot)
    with pytest.raises(ValueError, match="empty"):
        merge([], GRAPH, fot=fot)
    with pytest.raises(ValueError, match="zero"):
        merge([Update(good[0].state, num_examples=0)], GRAPH, fot=fot)
    first = good[0].state | {"8.bias": torch.full((12,), float("inf"))}
    with pytest.raises(ValueError, match=r"station-0.*8\.bias"):
        merge([Update(first)], GRAPH, fot=fot)


def test_bad_options_are_named():
    updates = different_stations(2)
    with pytest.raises(ValueError, match="channel graph"):
        merge(updates)
    with pytest.raises(ValueError, match="reference='second'"):
        merge(updates, GRAPH, reference="second")
    with pytest.raises(ValueError, match="coefficients='none'"):
        merge(updates, GRAPH, coefficients="none")
    with pytest.raises(ValueError, match="ridge"):
        merge(updates, GRAPH, ridge=-1.0)
