"""Five Flower apps that are not ours get HFedATM by the differences the documentation shows."""

import logging
import re
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.app import Error as FlowerError
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from hfedatm.runtime.in_process import InProcessGrid

ROOT = Path(__file__).resolve().parents[2]
APPS = ROOT / "tests" / "flower_apps"
PAGE = (ROOT / "docs" / "howto" / "flower-app.md").read_text(encoding="utf-8")
DIFFERENCES = dict(re.findall(r'^```diff title="([^"]+)"\n(.*?)^```$', PAGE, re.M | re.S))


class AppGrid(InProcessGrid):
    """Clients of an app, called directly, each with a partition of its own."""

    def send_and_receive(self, messages, *, timeout=None) -> list[Message]:
        """Return a list, as Flower's own Grids do and some of its strategies need."""
        return list(super().send_and_receive(messages, timeout=timeout))

    def _run(self, message: Message) -> Message:
        number = message.metadata.dst_node_id
        config = {"partition-id": number - 1, "num-partitions": len(self._clients)}
        run_config = {"local-epochs": 2}
        context = Context(0, number, config, RecordDict(), run_config)
        try:
            return self._app(message, context)
        except Exception as error:
            return Message(FlowerError(0, repr(error)), reply_to=message)


def changed(source: str, difference: str) -> str:
    """Apply a difference of the documentation; each part must fit exactly one place."""
    for part in difference.split("@@\n"):
        lines = part.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
        source = source.replace(old, new)
    return source


def run(source: str, clients: int, rounds: int = 2) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Run an app in this process; return its final model and what Flower's logger said."""
    names: dict = {"__name__": "flower_app"}
    torch.manual_seed(0)
    exec(compile(source, "flower_app", "exec"), names)
    [client] = [value for value in names.values() if isinstance(value, ClientApp)]
    [server] = [value for value in names.values() if isinstance(value, ServerApp)]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flwr").addHandler(handler)
    context = Context(0, 0, {}, RecordDict(), {"num-server-rounds": rounds})
    try:
        torch.manual_seed(1)
        server(AppGrid(client, range(1, clients + 1)), context)
    finally:
        logging.getLogger("flwr").removeHandler(handler)
    return torch.load("final_model.pt", weights_only=True), said


CASES = {  # clients, layers that RegMean merges, of how many
    "pytorch_app.py": (3, 2, 4),
    "huggingface_app.py": (2, 8, 11),
    "lightning_app.py": (2, 4, 4),
    "tabular_app.py": (3, 1, 1),
    "custom_records_app.py": (2, 2, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_two_changed_lines_give_hfedatm(name, tmp_path, monkeypatch):
    if name == "lightning_app.py":
        pytest.importorskip("lightning", reason="install hfedatm[dev]")
    monkeypatch.chdir(tmp_path)
    clients, solved, layers = CASES[name]
    source = (APPS / name).read_text(encoding="utf-8")
    before, _ = run(source, clients)
    after, said = run(changed(source, DIFFERENCES[name]), clients)
    assert list(after) == list(before)
    assert all(value.shape == before[name].shape for name, value in after.items())
    assert not all(torch.equal(value, before[name]) for name, value in after.items())
    lines = [line for line in said if line.startswith("hfedatm: ")]
    assert [re.sub(r"moved \d+ channels", "moved some", line) for line in lines] == [
        f"hfedatm: merged {clients} models, moved some, {solved} of {layers} layers by RegMean"
    ] * 2
    assert not any("failures" in line and not line.endswith("0 failures") for line in said)


MODS = "mods=[fixedclipping_mod, local_dp, grams()]"


@pytest.mark.parametrize(
    "order",
    ["grams(), fixedclipping_mod, local_dp", "local_dp, grams(), adaptiveclipping_mod"],
)
def test_mods_of_flower_may_stand_in_any_order(order, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "custom_records_app.py"
    source = changed((APPS / name).read_text(encoding="utf-8"), DIFFERENCES[name])
    assert MODS in source
    source = source.replace(MODS, f"mods=[{order}]")
    if "adaptive" in order:
        source = source.replace("fixedclipping_mod", "adaptiveclipping_mod")
        source = source.replace("ClientSideFixedClipping", "ClientSideAdaptiveClipping").replace(
            "clipping_norm=20.0, num", "initial_clipping_norm=20.0, num"
        )
    model, said = run(source, 2)
    assert sum("2 of 2 layers by RegMean" in line for line in said) == 2
    assert all(torch.isfinite(value).all() for value in model.values())


def test_a_third_line_gives_three_tiers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (APPS / "pytorch_app.py").read_text(encoding="utf-8")
    source = changed(source, DIFFERENCES["pytorch_app.py, three tiers"])
    _, said = run(source, 5, rounds=1)
    merges = [line for line in said if line.startswith("hfedatm: ")]
    assert len(merges) == 1 and "merged 2 models" in merges[0] and "2 of 4 layers" in merges[0]
    sampled = [line for line in said if line.startswith("configure_train: Sampled")]
    # The server asks two stations once; the stations ask two and three clients, twice each.
    assert sorted(line.split()[2] for line in sampled) == ["2", "2", "2", "3", "3"]
    assert any("eval_acc" in line for line in said)


def test_every_app_of_the_page_is_there_and_every_difference_is_small():
    assert {name.partition(",")[0] for name in DIFFERENCES} == {p.name for p in APPS.glob("*.py")}
    for name in ("pytorch_app.py", "lightning_app.py"):
        lines = DIFFERENCES[name].splitlines()
        assert len([line for line in lines if line[0] == "+"]) == 3  # an import and two lines
