"""The report: everything in one file, in one browser, from one run or several."""

import json
import re
import shutil
import subprocess
import warnings
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers import run_small

from hfedatm.base.errors import UserError
from hfedatm.base.round_record import LayerMergeQuality
from hfedatm.report import curves, render, write_report
from hfedatm.runs import read_run

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


class Page(HTMLParser):
    """What a page refers to, its headings and its figures."""

    def __init__(self, text):
        super().__init__()
        self.links, self.figures, self.headings, self.scripts = [], [], [], 0
        self._heading = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.links += [found[k] for k in ("src", "href", "xlink:href") if k in found]
        self.scripts += tag == "script"
        self._heading = tag in ("h2", "h3")
        if tag == "svg":
            self.figures.append(found["aria-label"])

    def handle_data(self, text):
        if self._heading and text.strip():
            self.headings.append(text.strip())


@pytest.fixture(scope="module")
def text(results):
    return render([read_run(results / "apart")])


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_every_figure_is_there(page):
    for label in (
        "Accuracy per round on source",
        "Accuracy per round of every domain",
        "Channels moved by the alignment",
        "Assignment of channels",
        "Filters of",
        "Distance between stations",
        "Eigenvalues of the Grams",
        "bytes up per round",
        "seconds per round",
        "Confusion matrix",
    ):
        assert any(figure.startswith(label) for figure in page.figures), label


def test_every_part_has_a_heading(page):
    for heading in (
        "Accuracy",
        "Every domain",
        "The tiers",
        "Inside the merge",
        "Cost",
        "Privacy",
        "Failures",
        "On the unseen domain",
        "Settings",
    ):
        assert heading in page.headings


def test_nothing_comes_from_outside(text, page):
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert not page.scripts
    assert not re.search(r"url\((?!#)|@import", text)


def test_colours_follow_the_page(text):
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"#(010203|040506|070809|0a0b0c|0d0e1\d)", text)  # no placeholder is left


def test_numbers_are_those_of_the_run(results, text):
    run = read_run(results / "apart")
    assert f"{100 * run.summary['last']['unseen_accuracy']:.1f} %" in text
    assert f"{100 * run.summary['last']['source_accuracy']:.1f} %" in text
    assert "station-start=own" in text  # the command that repeats it


def test_failures_are_shown_and_escaped(broken_run):
    text = render([read_run(broken_run)])
    assert "Diverged: &lt;nan&gt; &amp; more" in text
    assert "<nan>" not in text
    assert "kept the model of the round before: 1 of 2 stations usable" in text
    assert any(figure == "Failures per node and round" for figure in Page(text).figures)


def test_a_run_that_sent_nothing_is_drawn_without_complaint(broken_run):
    rounds = [json.loads(line) for line in (broken_run / "rounds.jsonl").read_text().splitlines()]
    silent = {"bytes_up": {"clients": 0, "stations": 0}, "per_station": [], "seconds": 0.0}
    (broken_run / "rounds.jsonl").write_text("".join(f"{json.dumps(r | silent)}\n" for r in rounds))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert "Cost" in Page(render([read_run(broken_run)])).headings


def test_the_fit_of_networks_without_a_common_start_is_shown(results):
    run = read_run(results / "apart")
    last = run.rounds[-1]
    quality = {
        "conv<1>": LayerMergeQuality(
            correlation_before=0.03, correlation_after=0.57, variance_before=0.41
        ),
        "head": LayerMergeQuality(variance_before=0.86, variance_after=0.87),
    }

    def shown(quality):
        merge = last.merge.model_copy(update={"quality": quality})
        rounds = [*run.rounds[:-1], last.model_copy(update={"merge": merge})]
        return render([replace(run, rounds=rounds)])

    text = shown(quality)
    assert "networks fit" in text
    row = "<td>0.03</td><td>0.57</td><td>0.41</td><td>1.00</td>"
    assert f"<code>conv&lt;1&gt;</code></th>{row}" in text
    assert "<td>–</td><td>–</td><td>0.86</td><td>0.87</td>" in text


def test_a_run_of_stations_with_their_own_starts_shows_how_its_layers_fit(tmp_path):
    settings = {"station_start": "own", "rounds": 1, "station_rounds": 1, "diagnostics": False}
    run = read_run(run_small(tmp_path, **settings))
    quality = run.rounds[-1].merge.quality
    assert quality.keys() == {"0", "4", "6"}
    assert any(one.correlation_after > one.correlation_before for one in quality.values()
               if one.correlation_after is not None)  # fmt: skip
    text = render([run])
    for layer, one in quality.items():
        pair = (one.correlation_before, one.correlation_after)
        shown = ["–" if number is None else f"{number:.2f}" for number in pair]
        shown += [f"{one.variance_before:.2f}", f"{one.variance_after:.2f}"]
        cells = "".join(f"<td>{number}</td>" for number in shown)
        assert f"<code>{layer}</code></th>{cells}" in text


def test_a_run_without_noise_says_so(page, text):
    assert "Privacy spent, per round" not in page.figures
    assert "Nothing is noised" in text


def test_privacy_is_shown_when_it_was_spent(broken_run):
    lines = (
        (broken_run / "rounds.jsonl")
        .read_text()
        .replace(
            '"round": ', '"privacy": {"epsilon": 1.5, "budget": 2.0, "delta": 1e-05}, "round": '
        )
    )
    (broken_run / "rounds.jsonl").write_text(lines)
    text = render([read_run(broken_run)])
    assert "Privacy spent, per round" in Page(text).figures


def test_several_runs_lie_over_each_other(results):
    runs = [read_run(results / name) for name in ("avg-0", "hfedatm-0")]
    text = render(runs)
    assert Page(text).headings[0] == "What differs"
    assert "<code>server-rule</code>" in text
    assert "avg-0, unseen" in text and "hfedatm-0, unseen" in text  # one figure's legend


def test_a_run_without_diagnostics_still_has_a_report(results, tmp_path):
    shutil.copytree(results / "apart", tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "diagnostics")
    found = Page(render([read_run(tmp_path / "bare")]))
    assert "Inside the merge" not in found.headings
    assert "Cost" in found.headings


def test_diagnostics_hold_what_the_merge_did(results):
    run = read_run(results / "apart")
    assert sorted(run.diagnostics) == [1, run.total]
    arrays = run.diagnostics[1]
    merge = run.rounds[0].merge.model_dump()
    for station, groups in merge["stations"].items():
        for group, report in groups.items():
            p = arrays[f"assignment/{station}/{group}"]
            assert sorted(p) == list(range(len(p)))
            assert (p != np.arange(len(p))).sum() == report["moved"]
    assert run.rounds[0].moved > 0  # or the next line would say nothing
    assert arrays["distance/after"].sum() < arrays["distance/before"].sum()
    counts = run.diagnostics[run.total]["confusion"]
    right = np.trace(counts) / counts.sum()
    assert right == pytest.approx(run.rounds[-1].unseen_accuracy)
    wrong = run.diagnostics[run.total]
    assert (wrong["wrong/targets"] != wrong["wrong/predicted"]).all()


def test_nothing_to_show_is_said(results, tmp_path):
    shutil.copytree(results / "avg-0", tmp_path / "new")
    (tmp_path / "new" / "rounds.jsonl").unlink()
    with pytest.raises(UserError, match="no round is finished yet"):
        write_report([read_run(tmp_path / "new")], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_command_writes_into_the_run(hfedatm, results, tmp_path):
    done = hfedatm("report", results / "avg-0", "-o", tmp_path / "x" / "page.html")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x" / "page.html").read_text().startswith("<!doctype html>")


def browser(tmp_path, *flags):
    """Return how to call a browser that shows nothing and asks nobody."""
    quiet = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --enable-logging=stderr --v=0 "
        "--window-size=1100,3000"
    ).split()
    return [CHROMIUM, *quiet, *flags, f"--user-data-dir={tmp_path / 'profile'}"]


NEEDS_BROWSER = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here to open the page with; apt-get install chromium"
)


@pytest.mark.e2e
@NEEDS_BROWSER
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_a_browser_shows_it_without_complaint(results, tmp_path, scheme):
    path = tmp_path / "report.html"
    write_report([read_run(results / "apart")], path)
    # The title is set only if every figure has a size and every picture was decoded.
    probe = """<script>addEventListener("load", () => {
      const svgs = [...document.querySelectorAll("figure svg")];
      const images = [...document.querySelectorAll("img")];
      const seen = svgs.filter(s => s.getBoundingClientRect().width > 100).length;
      const decoded = images.filter(i => i.naturalWidth).length;
      document.title = `${seen} of ${svgs.length}, ${decoded} of ${images.length}, `
        + getComputedStyle(document.body).backgroundColor;
    })</script></body>"""
    path.write_text(path.read_text().replace("</body>", probe))
    shot = tmp_path / "shot.png"
    common = browser(tmp_path, f"--blink-settings=preferredColorScheme={scheme}")
    dumped = subprocess.run(
        [*common, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in dumped.stderr, dumped.stderr
    title = re.search(r"<title>(.*?)</title>", dumped.stdout)[1]
    svgs, pictures, background = re.match(r"(\d+ of \d+), (\d+ of \d+), (.*)", title).groups()
    for shown, there in (text.split(" of ") for text in (svgs, pictures)):
        assert shown == there
    assert int(svgs.split()[0]) >= 10
    assert background == ("rgb(18, 21, 26)" if scheme == 0 else "rgb(246, 247, 249)")
    subprocess.run(
        [*common, f"--screenshot={shot}", path.as_uri()], capture_output=True, timeout=120
    )
    assert shot.stat().st_size > 50_000  # an empty page is far smaller


@pytest.mark.e2e
@NEEDS_BROWSER
def test_what_is_folded_on_the_screen_is_printed(results, tmp_path):
    runs = [read_run(results / name) for name in ("avg-0", "hfedatm-0")]
    text = render(runs)
    assert text.count("<details") > text.count("<details open")

    def pages(name, html):
        (tmp_path / f"{name}.html").write_text(html)
        paper = tmp_path / f"{name}.pdf"
        command = browser(tmp_path, f"--print-to-pdf={paper}", (tmp_path / f"{name}.html").as_uri())
        subprocess.run(command, capture_output=True, timeout=120, check=True)
        return len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes()))

    unfolded = pages("unfolded", re.sub("<details(?! open)", "<details open", text))
    without = pages("without", re.sub("<details.*</details>", "", text, flags=re.DOTALL))
    assert pages("as-it-is", text) == unfolded > without


def test_a_domain_has_one_colour_in_curves_and_tree_whichever_is_unseen(results):
    run = read_run(results / "hfedatm-0")
    numbers = curves.domain_numbers(run)
    assert numbers == {"a": 0, "b": 1, "c": 2}  # c is the unseen one
    text = render([run])
    for name in ("a", "b"):
        colour = f"c{numbers[name] + 1}"
        assert f'<i class="dot {colour}"></i>{name}' in text
        assert re.search(rf'<i class="{colour}" style="[^"]*" title="{name}: ', text)
    figure = curves.domains(run)
    drawn = [figure.index(f"var(--c{numbers[name] + 1})") for name in ("c", "a", "b")]
    assert drawn == sorted(drawn)  # as they are drawn: the unseen one first
