"""What signing, verifying, the journal and the policy add to a deployed round of ResNet-18.

One station has two clients that train nothing, so that training does not hide the cost. The script
measures the time of a deployed round with everything on. Then, on the same machine, it measures the
steps that each message takes for the sake of trust alone: sign it, verify it, check it against a
policy, and at a client store the reply. The figure is the time of these steps for all messages of a
round, one after another, divided by the time of the round.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tomli_w
from flwr.app import Message, RecordDict
from measure import Figure, details, options, publish
from workloads import be_a_process_of_a_run

from hfedatm.base.building import build_method, build_model, load_data
from hfedatm.base.handover.parcel import wrap
from hfedatm.base.records import Task, state_to_record
from hfedatm.base.resolving import resolve
from hfedatm.base.results import read_rounds
from hfedatm.base.trust.checking import check
from hfedatm.base.trust.journal import Journal
from hfedatm.base.trust.origin import Signer, Verifier, known_origin
from hfedatm.base.trust.policy import Policy
from hfedatm.deploy import certificates

HFEDATM = str(Path(sys.executable).with_name("hfedatm"))
HERE = Path(__file__).parent
CODE = {"code": {"allowed": ["workloads:random_images", "workloads:no_training"]}}
STATIONS, CLIENTS = 1, 2


def given(model: str) -> dict[str, object]:
    size = "" if model == "lenet5" else ",channels=3,size=32"
    return {
        "dataset": "workloads:random_images",
        "dataset-params": f"examples=64{size}",
        "target-domain": "target",
        "train-fn": "workloads:no_training",
        "model": model,
        "stations": STATIONS,
        "clients-per-station": CLIENTS,
        "rounds": 3,
        "station-rounds": 1,
        "validation-fraction": 0.0,
        "lambda": 1.0,
        "gram-min-rows": 1,
        "diagnostics": False,
        "device": "cpu",
    }


def deployed_round(folder: Path, model: str, first_port: int) -> float:
    """Return the seconds of a deployed round, the median of all but the first."""
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    policy = folder / "policy.toml"
    policy.write_text(tomli_w.dumps(CODE))
    state = ["--folder", str(folder / "state")]

    def hfedatm(*words: str) -> None:
        subprocess.run([HFEDATM, *words], check=True, env=environment)

    size = [f"--stations={STATIONS}", f"--clients={CLIENTS}", f"--first-port={first_port}"]
    run = [f"{key}={value}" for key, value in given(model).items()]
    try:
        hfedatm("up", *size, "--policy", str(policy), *state)
        hfedatm("submit", *run, f"output={folder}", "run-name=there", *state)
    finally:
        hfedatm("down", *state)
    return statistics.median(record.seconds for record in read_rounds(folder / "there")[1:])


def message_cost(folder: Path, model: str) -> dict[str, float]:
    """Return the seconds that each step of trust takes for one message with the model."""
    be_a_process_of_a_run()
    settings = resolve(given(model))
    spec, method = load_data(settings).spec, build_method(settings)
    state = build_model(settings, spec, method).state_dict()
    task = Task("train", settings, 1, station=0, station_round=1, client=0)
    content = wrap(RecordDict({"task": task.to_record(), "model": state_to_record(state)}))
    certificates.make_authority(folder)
    certificates.make_task_key(folder / "station-1")
    certificates.enrol(folder, folder / "client", "client", "station-1", 0)
    message = Message(content, 2, "train")
    os.environ["HFEDATM_SECRETS"] = str(folder / "station-1")
    signer = Signer.load()
    os.environ["HFEDATM_SECRETS"] = str(folder / "client")
    assert signer is not None
    signed = signer.signed(content, message.metadata, "client", "1")
    policy = Policy.model_validate(CODE)

    def verify() -> None:
        message.content = signed
        verifier = Verifier.load()
        assert verifier is not None
        verifier.check(message)

    steps = iter(range(10**6))

    def keep() -> None:
        with Journal(folder / "journal").step(str(next(steps)), "", time.time() + 60) as entry:
            entry.reply = content

    def in_one_process() -> None:
        known_origin(message, None, lambda asked, _: Message(RecordDict(), reply_to=asked))  # type: ignore[arg-type]

    found = {
        "sign": seconds(lambda: signer.signed(content, message.metadata, "client", "1")),
        "verify": seconds(verify),
        "policy": seconds(lambda: check(policy, settings, "train", True)),
        "keep the reply": seconds(keep),
    }
    del os.environ["HFEDATM_SECRETS"]
    message.content = content
    return found | {"one process, microseconds": 1e6 * seconds(in_one_process)}


def seconds(job: Callable[[], object], times: int = 9) -> float:
    """Return the median time of a job, waiting for the disk included."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        job()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--first-port", type=int, default=9700)
    own, rest = parser.parse_known_args(words)
    chosen = options(__doc__, rest)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # `hfedatm down` must still run
    model = "lenet5" if chosen.smoke else "resnet18"
    with tempfile.TemporaryDirectory() as name:
        whole = deployed_round(Path(name) / "deployed", model, own.first_port)
        steps = message_cost(Path(name) / "secrets", model)
    in_process = steps.pop("one process, microseconds")
    clients = STATIONS * CLIENTS
    added = (STATIONS + clients) * sum(steps.values()) - STATIONS * steps["keep the reply"]
    figure = Figure(
        f"what trust adds to a deployed round, {model}",
        100 * added / whole,
        2.0,
        "the whole round",
        unit="%",
        details=details(
            {"seconds of the round": whole, "seconds added": added, **steps}
            | {"microseconds a message in one process": in_process}
        ),
    )
    publish(__file__, [figure], chosen)


if __name__ == "__main__":
    main()
