import os
import re

import numpy as np
import pytest
import torch
from PIL import Image

from hfedatm_core.data import folder, load, office_home, pacs, terra_incognita
from hfedatm_core.data.folder import decode_image

COLOURS = {"dog": (255, 0, 0), "horse": (0, 255, 0), "person": (0, 0, 255)}


def write_images(root, domain, classes=("dog", "horse", "person"), count=2, suffix=".png"):
    for name in classes:
        place = root / domain / name
        place.mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (20, 12), COLOURS.get(name, (9, 9, 9))).save(
                place / f"{number}{suffix}"
            )


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HFEDATM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def decoded(monkeypatch):
    """Paths that were decoded."""
    paths = []

    def count(path, size):
        paths.append(path)
        return decode_image(path, size)

    monkeypatch.setattr(folder, "decode_image", count)
    return paths


@pytest.fixture
def site(tmp_path):
    for domain in pacs.DOMAINS:
        write_images(tmp_path / "data" / "PACS", domain)
    return tmp_path / "data"


def test_images_become_uint8_in_class_order(site):
    data = load("pacs", site, size=8)
    assert tuple(data.domains) == pacs.DOMAINS
    photo = data.domains["photo"]
    assert photo.inputs.dtype == torch.uint8 and photo.inputs.shape == (6, 3, 8, 8)
    # dog, horse and person are classes 0, 4 and 6 of PACS although only three are there.
    assert photo.targets.tolist() == [0, 0, 4, 4, 6, 6]
    assert photo.inputs[0, :, 3, 3].tolist() == [255, 0, 0]
    assert photo.inputs[5, :, 3, 3].tolist() == [0, 0, 255]
    assert data.spec.num_classes == 7 and data.spec.input_shape == (3, 8, 8)


def test_images_are_decoded_once(site, decoded):
    first = load("pacs", site, size=8)
    assert len(decoded) == 24
    second = load("pacs", site, size=8)
    assert len(decoded) == 24
    for name in pacs.DOMAINS:
        assert torch.equal(first.domains[name].inputs, second.domains[name].inputs)


def test_another_size_or_a_changed_image_is_decoded_again(site, decoded):
    load("pacs", site, size=8)
    load("pacs", site, size=10)
    assert len(decoded) == 48
    changed = site / "PACS" / "photo" / "dog" / "0.png"
    Image.new("RGB", (20, 12), (1, 2, 3)).save(changed)
    os.utime(changed, (1, 1))
    data = load("pacs", site, size=8)
    # Only the domain with the changed image.
    assert len(decoded) == 54
    assert data.domains["photo"].inputs[0, :, 0, 0].tolist() == [1, 2, 3]


def test_the_data_folder_itself_may_be_named_and_may_hold_one_domain(tmp_path, caplog):
    write_images(tmp_path / "hospital", "sketch", classes=("person",))
    data = load("pacs", tmp_path / "hospital", size=8)
    assert list(data.domains) == ["sketch"]
    assert data.domains["sketch"].targets.tolist() == [6, 6]
    assert data.spec.class_names == pacs.LAYOUT.classes
    assert "no folder for art_painting, cartoon, photo" in caplog.text


def test_chosen_domains_alone_are_read(site, decoded, caplog):
    data = load("pacs", site, size=8, domains="photo+Art")
    assert list(data.domains) == ["photo", "art_painting"]
    assert len(decoded) == 12
    assert caplog.text == ""
    with pytest.raises(ValueError, match="'phto' is not in .*Did you mean 'photo'"):
        load("pacs", site, domains="phto")


def test_a_missing_data_set_says_where_to_get_and_put_it(tmp_path):
    for name, title, first in (
        ("pacs", "PACS", "PACS"),
        ("office-home", "Office-Home", "office_home"),
        ("terra-incognita", "Terra Incognita", "terra_incognita"),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            load(name, tmp_path)
        message = str(caught.value)
        assert f"{title} is not in the data directory" in message
        assert "Get it: python -m domainbed.scripts.download" in message
        assert f"Put it: {tmp_path / first}/<domain>/<class>/<image>" in message
        assert f"set the data directory to {tmp_path}" in message
        with pytest.raises(FileNotFoundError, match="none is set"):
            load(name, None)
        with pytest.raises(FileNotFoundError, match="none is set"):
            load(name, "")


def test_an_unknown_class_folder_is_refused(site):
    write_images(site / "PACS", "photo", classes=("hourse",))
    with pytest.raises(ValueError, match="hourse is not one of the 7 classes.*Did you mean 'ho"):
        load("pacs", site, size=8)


def test_a_broken_image_is_named_and_nothing_is_cached(site, decoded):
    broken = site / "PACS" / "photo" / "dog" / "9.jpg"
    broken.write_bytes(b"not an image")
    with pytest.raises(ValueError, match=re.escape(f"cannot read the image {broken}")):
        load("pacs", site, size=8)
    broken.unlink()
    assert len(load("pacs", site, size=8).domains["photo"]) == 6


def test_a_domain_without_images_is_named(tmp_path):
    (tmp_path / "PACS" / "photo" / "dog").mkdir(parents=True)
    with pytest.raises(ValueError, match="photo holds no images"):
        load("pacs", tmp_path)
    (tmp_path / "PACS" / "photo" / "dog").rmdir()
    with pytest.raises(ValueError, match="photo has no class folders"):
        load("pacs", tmp_path)


def test_gray_and_transparent_images_become_rgb(tmp_path):
    Image.new("L", (9, 9), 100).save(tmp_path / "gray.png")
    Image.new("RGBA", (9, 9), (1, 2, 3, 255)).save(tmp_path / "alpha.png")
    assert decode_image(tmp_path / "gray.png", 4)[:, 0, 0].tolist() == [100] * 3
    assert decode_image(tmp_path / "alpha.png", 4)[:, 0, 0].tolist() == [1, 2, 3]


def test_a_large_jpeg_is_reduced_faithfully(tmp_path):
    ramp = np.linspace(0, 255, 400, dtype=np.uint8)
    Image.fromarray(np.repeat(ramp[None], 300, 0)).convert("RGB").save(
        tmp_path / "ramp.jpg", quality=95
    )
    small = decode_image(tmp_path / "ramp.jpg", 10).astype(float)
    expected = (np.arange(10) + 0.5) * 25.5
    assert np.abs(small - expected).max() < 4


def test_a_client_reads_its_share_of_a_mapped_domain(site, recwarn):
    domain = load("pacs", site, size=8).domains["photo"]
    part = domain.subset(torch.tensor([5, 1]))
    assert part.inputs[0, 2].unique().tolist() == [255]
    assert part.targets.tolist() == [6, 0]
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_your_own_folder(tmp_path):
    for domain in ("north", "south"):
        write_images(tmp_path / "mine", domain, classes=("x", "y"))
    write_images(tmp_path / "mine", "east", classes=("z",))
    data = load("folder", tmp_path / "mine", size=8)
    assert list(data.domains) == ["east", "north", "south"]
    assert data.spec.class_names == ("x", "y", "z")
    assert data.domains["east"].targets.tolist() == [2, 2]
    site = load("folder", tmp_path / "mine", size=8, domains="east", classes="x+y+z")
    assert site.domains["east"].targets.tolist() == [2, 2] and site.spec.num_classes == 3
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load("folder", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="needs a data directory"):
        load("folder")


def test_the_known_class_lists_are_complete_and_sorted_as_folders_are():
    for module, count in ((pacs, 7), (office_home, 65), (terra_incognita, 10)):
        classes = module.LAYOUT.classes
        assert len(set(classes)) == len(classes) == count
        assert list(classes) == sorted(classes)


def test_terra_incognita_and_office_home_under_their_other_names(tmp_path):
    write_images(tmp_path / "terra_incognita", "location_38", classes=("bird", "squirrel"))
    data = load("terra-incognita", tmp_path, size=8)
    assert data.key("L38") == "location_38"
    assert data.domains["location_38"].targets.tolist() == [0, 0, 9, 9]
    write_images(tmp_path / "OfficeHome", "RealWorld", classes=("TV", "Toothbrush"))
    data = load("office-home", tmp_path, size=8)
    assert list(data.domains) == ["Real World"] and data.key("R") == "Real World"
    assert [data.spec.class_names[t] for t in data.domains["Real World"].targets[::2]] == [
        "TV",
        "ToothBrush",
    ]


@pytest.mark.data
def test_the_real_pacs(pacs_data, monkeypatch, pytestconfig):
    monkeypatch.setenv("HFEDATM_CACHE", str(pytestconfig.cache.mkdir("hfedatm-cache")))
    data = load("pacs", pacs_data, size=32)
    counts = {name: len(domain) for name, domain in data.domains.items()}
    assert counts == {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
    photo = data.domains["photo"]
    assert photo.targets.bincount().tolist() == [189, 202, 182, 186, 199, 280, 432]
    # A sketch is mostly white paper, a photo is not.
    assert data.domains["sketch"].inputs[:200].float().mean() > 200 > photo.inputs.float().mean()
