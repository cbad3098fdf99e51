"""Run all benchmarks, each in a process of its own, and write the table of ``docs/performance.md``.

python benchmarks/run_all.py                  # everything, under 15 minutes on 2 quiet cores
python benchmarks/run_all.py fot_layer        # one of them; other figures come from the last run
python benchmarks/run_all.py --table          # only the table, from the JSON files
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import RESULTS, verdict

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- table: benchmarks/run_all.py -->", "<!-- end of table -->"
SCRIPTS = (
    "fot_layer",
    "merge_resnet18",
    "merge_apart",
    "regmean_roberta",
    "gram_collection",
    "gram_bytes",
    "vgg11_merge",
    "memory_growth",
    "clients_per_second",
    "round_overhead",
    "deployment_overhead",
    "trust_cost",
)
# They measure bytes, which other processes do not change.
SIDE_BY_SIDE = ("memory_growth", "vgg11_merge", "gram_bytes")
# The libraries read these when they are loaded; each script then sets the same number itself.
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}


def run(script: str) -> None:
    print(f"== {script}", flush=True)
    started = time.perf_counter()
    command = [sys.executable, str(HERE / f"{script}.py")]
    subprocess.run(command, check=True, env=os.environ | ONE_THREAD)
    print(f"== {script}: {time.perf_counter() - started:.0f} s", flush=True)


def table() -> str:
    """Return the figures of all JSON files as a Markdown table."""
    lines = ["| figure | measured | target | | compared with |", "|---|---|---|---|---|"]
    files = [RESULTS / f"{script}.json" for script in SCRIPTS]
    results: list[dict[str, Any]] = [
        json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()
    ]
    for result in results:
        for figure in result["figures"]:
            unit = " ×" if figure["unit"] == "x" else f" {figure['unit']}"
            lines.append(
                f"| {figure['name']} | {figure['value']:.3g}{unit} | {figure['target']} "
                f"| {verdict(figure['reached'])} | {figure['compared_with']} |"
            )
    if results:
        machine, versions = results[-1]["machine"], results[-1]["versions"]
        load = max(result["machine"]["load"] for result in results)
        lines += [
            "",
            f"{machine['cores']} cores, {results[-1]['threads']} thread per benchmark, load of the "
            f"machine up to {load:.0f}; "
            + ", ".join(f"{name} {number}" for name, number in versions.items())
            + ".",
        ]
    return "\n".join(lines)


def write_page(text: str, page: Path = PAGE) -> None:
    """Put the table between its two marks."""
    content = page.read_text(encoding="utf-8")
    before, rest = content.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scripts", nargs="*", metavar="NAME", help=f"of {', '.join(SCRIPTS)}")
    parser.add_argument("--table", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    unknown = set(chosen.scripts) - set(SCRIPTS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}")
    scripts = [] if chosen.table else chosen.scripts or SCRIPTS
    for script in scripts:
        if script not in SIDE_BY_SIDE:
            run(script)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, [script for script in SIDE_BY_SIDE if script in scripts]))
    text = table()
    print(text)
    write_page(text)


if __name__ == "__main__":
    main()
