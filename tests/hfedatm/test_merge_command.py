"""`hfedatm merge` and `hfedatm grams`: files in, one file out."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hfedatm.cli.main import app
from hfedatm_core.checkpoints import write_state

NETS = """
import torch
from torch import nn

def build(num_classes=4):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, num_classes),
    )

def narrow(num_classes=4):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, num_classes),
    )

def other(num_classes=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))

def with_example():
    return build(), torch.zeros(1, 3, 8, 8)

def inputs():
    yield torch.rand(70, 3, 8, 8)

def fixed():
    yield torch.rand(70, 3, 8, 8, generator=torch.Generator().manual_seed(0))

def nothing():
    return []
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with own code, three checkpoints and some images, and go there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mergenets.py").write_text(NETS)
    namespace: dict = {}
    exec(NETS, namespace)
    for seed, name in enumerate(("a.safetensors", "b.safetensors", "c.pt")):
        torch.manual_seed(seed)
        write_state(tmp_path / name, namespace["build"](5).state_dict())
    (tmp_path / "images").mkdir()
    draw = np.random.default_rng(0)
    for number in range(8):
        pixels = draw.integers(0, 255, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    yield tmp_path
    sys.modules.pop("mergenets", None)


def run(monkeypatch, *arguments) -> int:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["hfedatm", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        app()
    return ended.value.code or 0


FILES = ("a.safetensors", "b.safetensors", "c.pt")
MODEL = ("--model", "mergenets:build", "--input", "3x8x8")


def test_three_files_become_one_with_a_row_per_layer(folder, monkeypatch, capsys):
    assert run(monkeypatch, "merge", *FILES, *MODEL, "--out", "merged.safetensors") == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert "moved" in rows["0"] and "averaged" in rows["0"]
    assert "the network's output" in rows["7"]
    assert "No Grams were given" in printed and "1 BatchNorm layers were averaged" in printed
    merged = load_file("merged.safetensors")
    assert merged["7.weight"].shape == (5, 8)


def test_grams_and_images_at_hand_are_used(folder, monkeypatch, capsys):
    for name in FILES:
        assert run(monkeypatch, "grams", name, *MODEL, "--data", "mergenets:inputs") == 0
    out = ("--recalibrate", "images", "--out", "merged.pt", "--json")
    grams = [word for name in "abc" for word in ("--grams", f"{name}.grams")]
    capsys.readouterr()
    assert run(monkeypatch, "merge", *FILES, *MODEL, *grams, *out) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["how"] for row in found["layers"]] == ["regmean"] * 3
    before, after = (sum(row[key] for row in found["layers"]) for key in ("before", "after"))
    assert 0 <= after < before
    assert not found["notes"]
    merged = torch.load("merged.pt", weights_only=True)
    assert merged["7.weight"].dtype == torch.float32
    assert merged["1.num_batches_tracked"] == 1  # eight images are one batch


def test_refining_uses_the_data_of_every_checkpoint(folder, monkeypatch, capsys):
    """On shared inputs the refined outputs are nearer to the mean of the networks' outputs."""
    for name in FILES:
        assert run(monkeypatch, "grams", name, *MODEL, "--data", "mergenets:fixed") == 0
    grams = [word for name in "abc" for word in ("--grams", f"{name}.grams")]
    merge = ("merge", *FILES, *MODEL, *grams)
    assert run(monkeypatch, *merge, "--out", "plain.pt") == 0
    assert run(monkeypatch, *merge, "--refine", "mergenets:fixed", "--out", "all.pt") == 0
    own = [word for data in ("mergenets:fixed", "mergenets:fixed", "images") for word in
           ("--refine", data)]  # fmt: skip
    assert run(monkeypatch, *merge, *own, "--out", "own.pt") == 0
    exec(NETS, namespace := {})
    network, (x,) = namespace["build"](5).eval(), namespace["fixed"]()

    def outputs(path):
        read = load_file if path.endswith("safetensors") else torch.load
        network.load_state_dict(read(path))
        return network(x)

    with torch.no_grad():
        wanted = sum(map(outputs, FILES)) / 3
        errors = {n: float((outputs(f"{n}.pt") - wanted).square().mean())
                  for n in ("plain", "all", "own")}  # fmt: skip
    assert errors["all"] < 0.5 * errors["plain"]
    assert errors["own"] != errors["all"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--refine", "images"), "give --grams"),
        (("--grams", "a.grams", "--shared-start", "--refine", "images"), "leave --shared-start"),
        (("--grams", "a.grams", *["--refine", "images"] * 2), "3 times, not 2"),
        (("--grams", "a.grams", "--refine", "nowhere"), "nowhere holds no images"),
        (("--grams", "a.grams", "--refine", "mergenets:nothing"), "no data to refine on"),
    ],
    ids=["no Grams", "shared start", "two of three", "no images", "no data"],
)
def test_what_cannot_be_refined_is_refused(folder, monkeypatch, capsys, options, says):
    assert run(monkeypatch, "grams", "a.safetensors", *MODEL, "--data", "images") == 0
    assert run(monkeypatch, "merge", *FILES, *MODEL, *options, "--out", "merged.pt") == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (folder / "merged.pt").exists()


def test_a_smaller_file_of_grams_and_a_shared_start(folder, monkeypatch, capsys):
    for name in FILES:
        options = ("--data", "mergenets:inputs", "--linear")
        assert run(monkeypatch, "grams", name, *MODEL, *options) == 0
    out = ("--shared-start", "--reference", "medoid", "--out", "merged.pt", "--json")
    grams = [word for name in "abc" for word in ("--grams", f"{name}.grams")]
    capsys.readouterr()
    assert run(monkeypatch, "merge", *FILES, *MODEL, *grams, *out) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["how"] for row in found["layers"]] == ["averaged", "regmean", "regmean"]
    assert "BatchNorm layers were averaged" in found["notes"][0]


def test_half_precision_stays_half_precision(folder, monkeypatch):
    from safetensors.torch import save_file

    for name in FILES[:2]:
        state = {n: v.half() if v.is_floating_point() else v for n, v in load_file(name).items()}
        save_file(state, name)
    options = ("--recalibrate", "images", "--out", "merged.safetensors")
    assert run(monkeypatch, "merge", *FILES[:2], *MODEL, *options) == 0
    merged = load_file("merged.safetensors")
    assert {v.dtype for v in merged.values()} == {torch.float16, torch.int64}


def test_what_is_not_aligned_is_said_in_the_table_alone(folder, monkeypatch, capsys):
    (folder / "mergenets.py").write_text(NETS.replace("nn.ReLU(), nn.Linear", "Odd(), nn.Linear"))
    with (folder / "mergenets.py").open("a") as file:
        file.write("class Odd(nn.Module):\n    def forward(self, x):\n        return x.cumsum(1)\n")
    assert run(monkeypatch, "merge", *FILES, *MODEL, "--out", "merged.pt") == 0
    printed = capsys.readouterr()
    row = next(line for line in printed.out.splitlines() if line.split()[:1] == ["5"])
    assert "cumsum" in row and "unaligned" not in printed.err


def test_a_function_may_bring_its_example_and_the_medoid_may_be_the_reference(
    folder, monkeypatch, capsys
):
    files = [f"{seed}.pt" for seed in range(3)]
    exec(NETS, namespace := {})
    for seed, name in enumerate(files):
        torch.manual_seed(seed)
        write_state(folder / name, namespace["build"]().state_dict())
    options = ("--model", "mergenets:with_example", "--reference", "medoid", "--out", "m.pt")
    assert run(monkeypatch, "merge", *files, *options) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.safetensors", "b.safetensors", "--out", "a.safetensors"), "is one of the checkpoints"),
        (("a.safetensors", "d.pt", "--out", "m.pt"), "there is no checkpoint d.pt"),
        (("a.safetensors", "b.safetensors", "--out", "no/m.pt"), "--out: there is no folder"),
        (("a.safetensors", "images.pt", "--out", "m.pt"), "has 4 classes, the model 5"),
        (
            ("a.safetensors", "b.safetensors", "--recalibrate", "nowhere", "--out", "m.pt"),
            "nowhere holds no images",
        ),
        (("a.safetensors", "b.safetensors", "--input", "3-8", "--out", "m.pt"), "like 3x32x32"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_written(
    folder, monkeypatch, capsys, arguments, message
):
    torch.manual_seed(0)
    exec(NETS, namespace := {})
    write_state(folder / "images.pt", namespace["build"](4).state_dict())
    assert run(monkeypatch, "merge", *MODEL, *arguments) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1] and said[-1].startswith("hfedatm: ")
    assert not (folder / "m.pt").exists()


# --- different widths


def test_networks_of_different_width_merge_into_a_target(folder, monkeypatch, capsys):
    namespace: dict = {}
    exec(NETS, namespace)
    torch.manual_seed(7)
    write_state(folder / "n.pt", namespace["narrow"](5).state_dict())
    (folder / "own").mkdir()
    shape = ("--input", "3x8x8")
    files = ("n.pt", "a.safetensors")
    both = ("--model", "mergenets:narrow", "--model", "mergenets:build", *shape)
    target = ("--target", "mergenets:build", "--out", "merged.pt", "--back", "own")
    assert run(monkeypatch, "merge", *files, *both, *target) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "n.pt: 2 of 2 channel groups have another width." in printed
    assert torch.load("merged.pt")["0.weight"].shape == (6, 3, 3, 3)
    assert torch.load("own/n.pt")["5.weight"].shape == (5, 16)
    assert load_file("own/a.safetensors")["7.weight"].shape == (5, 8)
    for name, model in (("n.pt", "narrow"), ("a.safetensors", "build")):
        more = ("--model", f"mergenets:{model}", *shape, "--data", "mergenets:inputs")
        assert run(monkeypatch, "grams", name, *more) == 0
    grams = ("--grams", "n.grams", "--grams", "a.grams")
    assert run(monkeypatch, "merge", *files, *both, *target, *grams, "--json") == 0
    printed = capsys.readouterr().out
    layers = json.loads(printed[printed.index("{") :])["layers"]
    assert {row["how"] for row in layers} == {"regmean"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--model", "mergenets:build", "--model", "mergenets:build"), "name the result's with"),
        (("--model", "mergenets:build", "--back", "."), "--back: needs --target"),
        (
            ("--model", "mergenets:build", "--target", "mergenets:other"),
            "does not fit into the tar",
        ),
        (("--model", "mergenets:build", "--target", "mergenets:build", "--shared-start"), "leave"),
    ],
)
def test_what_cannot_be_matched_is_refused(folder, monkeypatch, capsys, options, says):
    out = ("--input", "3x8x8", "--out", "merged.pt")
    assert run(monkeypatch, "merge", "a.safetensors", "b.safetensors", *options, *out) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (folder / "merged.pt").exists()
