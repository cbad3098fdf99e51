"""Collection of Grams in one evaluation pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hfedatm_core import FactorGram, PackedGram, collect_grams, forward


@pytest.fixture(autouse=True)
def _double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class Attention(nn.Module):
    """Query, key and value see one tensor; ``spare`` is never called."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6, bias) for _ in range(3))
        self.spare = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, hidden, attention_mask=None):
        mixed = torch.softmax(self.q(hidden) @ self.k(hidden).transpose(1, 2), -1) @ self.v(hidden)
        return self.head(mixed.mean(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.5), nn.Linear(7, 3))


def second_moment(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows.T @ rows / len(rows)


def test_the_gram_is_the_mean_outer_product_over_all_rows():
    model, data = mlp(), [(torch.randn(n, 5), None) for n in (4, 1, 9)]
    grams = collect_grams(model, data)
    x = torch.cat([inputs for inputs, _ in data])
    assert list(grams) == ["0", "3"]
    assert all(isinstance(gram, PackedGram) and gram.rows == 14 for gram in grams.values())
    torch.testing.assert_close(grams["0"].dense(), second_moment(x))
    torch.testing.assert_close(grams["3"].dense(), second_moment(model[0](x).relu()))


def test_split_batches_add_up_to_the_whole():
    model, data = mlp(), [(torch.randn(4, 5), None) for _ in range(5)]
    for max_dim in (4096, 1):
        whole = collect_grams(model, data, max_dim)
        first, second = (
            collect_grams(model, data[:2], max_dim),
            collect_grams(model, data[2:], max_dim),
        )
        for name, gram in whole.items():
            torch.testing.assert_close((first[name] + second[name]).dense(), gram.dense())


def test_only_max_batches_are_read():
    source = iter([(torch.randn(4, 5), None) for _ in range(5)])
    assert collect_grams(mlp(), source, max_batches=2)["0"].rows == 8
    assert len(list(source)) == 3
    assert collect_grams(mlp(), []) == {}


def test_layers_with_the_same_input_share_one_gram():
    x = torch.randn(3, 4, 6)
    grams = collect_grams(Attention(), [({"hidden": x}, None)] * 2)
    assert grams["q"] is grams["k"] is grams["v"]
    assert grams["head"] is not grams["q"]
    assert "spare" not in grams
    torch.testing.assert_close(grams["q"].dense(), second_moment(x))


def test_equal_values_in_different_tensors_are_not_shared():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) + self.b(x * 2)

    x = torch.randn(5, 4)
    grams = collect_grams(Twice(), [(x, None)])
    assert grams["a"] is not grams["b"]
    torch.testing.assert_close(grams["b"].dense(), 4 * second_moment(x))


def test_layers_part_when_a_later_batch_tells_them_apart():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) + self.b(x if len(x) > 2 else x + 1)

    big, small = torch.randn(5, 4), torch.randn(2, 4)
    grams = collect_grams(Fickle(), [(big, None), (small, None), (big, None)])
    torch.testing.assert_close(grams["a"].dense(), second_moment(torch.cat([big, small, big])))
    torch.testing.assert_close(grams["b"].dense(), second_moment(torch.cat([big, small + 1, big])))


def test_all_calls_of_a_layer_count():
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.shared(x) + self.shared(input=x + 1) + self.other(x)

    x = torch.randn(5, 4)
    grams = collect_grams(Siamese(), [(x, None)])
    assert grams["shared"].rows == 10 and grams["other"].rows == 5
    torch.testing.assert_close(grams["shared"].dense(), second_moment(torch.cat([x, x + 1])))
    torch.testing.assert_close(grams["other"].dense(), second_moment(x))


def test_an_input_that_is_overwritten_in_place_is_seen_as_it_was():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = x * 1
            h += self.first(h)
            return self.second(h)

    model, data = Residual(), [(torch.randn(6, 4), None) for _ in range(3)]
    x = torch.cat([inputs for inputs, _ in data])
    grams = collect_grams(model, data)
    torch.testing.assert_close(grams["first"].dense(), second_moment(x))
    torch.testing.assert_close(grams["second"].dense(), second_moment(x + model.first(x)))


def test_padding_does_not_count():
    x, mask = torch.randn(3, 4, 6), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    grams = collect_grams(Attention(), [({"hidden": x, "attention_mask": mask}, None)])
    assert grams["q"].rows == 7 and grams["head"].rows == 3
    torch.testing.assert_close(grams["q"].dense(), second_moment(x[mask.bool()]))


def test_clipping_scales_the_rows_of_an_example_together():
    x, mask = torch.randn(3, 4, 6), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    x[2] *= 0.01
    clip = 1.5
    batch = ({"hidden": x, "attention_mask": mask}, None)
    gram = collect_grams(Attention(), [batch], clip=clip)["q"]
    valid = x * mask[..., None]
    norms = valid.square().sum((1, 2)).sqrt()
    assert norms[0] > clip and norms[1] > clip > norms[2]
    clipped = valid * (clip / norms.clamp(min=clip))[:, None, None]
    torch.testing.assert_close(gram.dense(), clipped.reshape(-1, 6).T @ clipped.reshape(-1, 6) / 7)
    assert gram.rows == 7
    one = collect_grams(Attention(), [({"hidden": x[:1]}, None)], clip=clip)["q"]
    assert one.diagonal().sum() * one.rows == pytest.approx(clip**2)


def test_clipping_counts_all_calls_of_an_example_together():
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(4, 4)

        def forward(self, x):
            return self.shared(x) + self.shared(x + 1)

    gram = collect_grams(Siamese(), [(torch.randn(1, 4) * 9, None)], clip=1.0)["shared"]
    assert gram.diagonal().sum() * gram.rows == pytest.approx(1.0)


def test_clipping_refuses_rows_that_belong_to_no_example():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x[:-1])

    with pytest.raises(ValueError, match="'layer'.*3 examples"):
        collect_grams(Odd(), [(torch.randn(3, 4), None)], clip=1.0)
    with pytest.raises(ValueError, match="clip"):
        collect_grams(Odd(), [], clip=0.0)


def test_bias_adds_a_constant_feature_where_there_is_a_bias():
    x = torch.randn(3, 4, 6)
    model = Attention(bias=False)
    grams = collect_grams(model, [({"hidden": x}, None)], bias=True)
    assert grams["q"].dim == 6 and grams["head"].dim == 7
    torch.testing.assert_close(grams["head"].dense()[-1, -1], torch.tensor(1.0))


@pytest.mark.parametrize("rank", [3, 6, 20])
def test_wide_layers_use_the_factor_form(rank):
    basis = torch.randn(3, 12)  # the data has rank 3
    data = [(torch.randn(4, 3) @ basis, None) for _ in range(9)]
    model = nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 2))
    grams = collect_grams(model, data, max_dim=11, rank=rank)
    assert isinstance(grams["0"], FactorGram) and isinstance(grams["1"], PackedGram)
    assert len(grams["0"].factor) <= rank and grams["0"].rank == rank
    exact = collect_grams(model, data)["0"].dense()
    torch.testing.assert_close(grams["0"].dense(), exact, rtol=0, atol=1e-12)


def test_a_truncated_factor_has_the_exact_diagonal():
    data = [(torch.randn(8, 12), None) for _ in range(6)]
    model = nn.Sequential(nn.Linear(12, 2))
    low = collect_grams(model, data, max_dim=4, rank=5)["0"]
    exact = collect_grams(model, data)["0"]
    torch.testing.assert_close(low.diagonal(), exact.diagonal())
    assert (low.dense() - exact.dense()).abs().max() > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 1, "stride": 2},
        {"padding": "same", "dilation": 2},
        {"padding": "valid", "bias": False},
    ],
)
def test_convolutions_are_linear_layers_on_patches(options):
    model = nn.Sequential(nn.Conv2d(2, 5, 3, **options), nn.ReLU())
    x = torch.randn(4, 2, 9, 8)
    assert collect_grams(model, [(x, None)]) == {}
    gram = collect_grams(model, [(x, None)], conv=True)["0"]
    out = F.conv2d(x, model[0].weight, None, model[0].stride, model[0].padding, model[0].dilation)
    weight = model[0].weight.flatten(1)
    assert gram.rows == out[:, 0].numel() and gram.dim == 18
    rows = out.transpose(0, 1).flatten(1)
    torch.testing.assert_close(weight @ gram.dense() @ weight.T, rows @ rows.T / gram.rows)


def test_grouped_and_reflecting_convolutions_have_no_gram():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
    )
    assert collect_grams(model, [(torch.randn(1, 2, 8, 8), None)], conv=True) == {}


def test_modes_are_restored_and_hooks_removed_even_after_an_error():
    model = mlp().train()
    model[2].eval()
    collect_grams(model, [(torch.randn(4, 5), None)])
    with pytest.raises(RuntimeError):
        collect_grams(model, [(torch.randn(4, 6), None)])
    assert model.training and model[0].training and not model[2].training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_float32_models_give_float32_grams_and_half_inputs_are_widened():
    model = mlp().float()
    gram = collect_grams(model, [(torch.randn(4, 5).float(), None)])["0"]
    assert gram.dtype == torch.float32
    half = collect_grams(mlp().bfloat16(), [(torch.randn(4, 5).bfloat16(), None)])["0"]
    assert half.dtype == torch.float32 and half.is_finite()


def test_forward_takes_tensors_and_mappings():
    model, x = Attention(), torch.randn(2, 3, 6)
    torch.testing.assert_close(forward(model, x), forward(model, {"hidden": x}))
