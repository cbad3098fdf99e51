"""Typeset a table's numbers as Markdown, LaTeX and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hfedatm.reproduce.results import Entry, Panel
from hfedatm.reproduce.tables import Table

SIGN = "*"
LATEX = {"λ": r"$\lambda$", "ε": r"$\varepsilon$", "β": r"$\beta$", "γ": r"$\gamma$"} | {
    "α": r"$\alpha$",
    "∞": r"$\infty$",
    "±": r"$\pm$",
    "%": r"\%",
    "_": r"\_",
    "–": "--",
}


def entry_text(entry: Entry) -> str:
    """Return ``mean ± error``, a mark if it differs from the first row, and the paper's figure."""
    found = entry.estimate
    if found is None:
        text = "–"
    else:
        error = "" if found.error is None else f" ± {found.error:.1f}"
        text = f"{found.mean:.1f}{error}{SIGN if entry.marked else ''}"
    if entry.paper is None:
        return text
    difference = "" if found is None else f", {found.mean - entry.paper:+.1f}"
    return f"{text} (paper {entry.paper:.1f}{difference})"


def footnote(table: Table) -> str:
    """Return the sentence that explains the numbers."""
    seeds = ", ".join(map(str, table.seeds))
    last = list(table.rows)[-1]
    first = "the same with Avg" if " + " in last else table.baseline(last)
    bounds = "Central training and the best single station, chosen by source validation, are not "
    return (
        f"Mean ± standard error over seeds {seeds}. {SIGN}: differs from {first} in a two-sided "
        "t-test paired over seeds and targets, at 5 % over all rows of the column (Holm). "
        + (f"{bounds}tested. " if table.bounds else "")
        + "The unseen domain is never used to select a model."
    )


def markdown(table: Table, panels: Sequence[Panel], command: str, conditions: str) -> str:
    """Return the whole document."""
    lines = [f"# {table.title}", "", conditions, "", "```", command, "```", ""]
    for panel in panels:
        groups = len(dict.fromkeys(group for group, _ in panel.columns)) > 1
        heads = [f"{group}: {name}" if groups else name for group, name in panel.columns]
        lines += [f"**{panel.caption}**", ""]
        lines.append("| | " + " | ".join(heads) + " |")
        lines.append("|---|" + "---:|" * len(heads))
        for row, entries in panel.rows.items():
            texts = [entry_text(entries[place]) for place in panel.columns]
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
        lines.append("")
    return "\n".join([*lines, footnote(table), ""])


def latex(table: Table, panels: Sequence[Panel]) -> str:
    """Return one ``tabular`` per measure (booktabs)."""
    blocks = []
    for panel in panels:
        heads = [f"{group}: {name}" for group, name in panel.columns]
        body = [
            " & ".join([row, *(entry_text(entries[place]) for place in panel.columns)]) + r" \\"
            for row, entries in panel.rows.items()
        ]
        blocks.append(
            "\n".join(
                [
                    f"% {panel.caption}",
                    r"\begin{tabular}{l" + "r" * len(heads) + "}",
                    r"\toprule",
                    _escape(" & ".join(["", *heads])) + r" \\",
                    r"\midrule",
                    *map(_escape, body),
                    r"\bottomrule",
                    r"\end{tabular}",
                ]
            )
        )
    return "\n\n".join([*blocks, f"% {footnote(table)}", ""])


def _escape(text: str) -> str:
    for character, command in LATEX.items():
        text = text.replace(character, command)
    return text


def picture(table: Table, panel: Panel, path: Path) -> None:
    """Draw the columns as groups of bars with standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(panel.rows)
    width = 0.8 / len(rows)
    figure, axes = plt.subplots(figsize=(max(6.0, 1.2 * len(panel.columns)), 3.6))
    for number, row in enumerate(rows):
        places = [i + number * width for i in range(len(panel.columns))]
        found = [panel.rows[row][place].estimate for place in panel.columns]
        axes.bar(
            places,
            [e.mean if e else 0.0 for e in found],
            width,
            yerr=[(e.error or 0.0) if e else 0.0 for e in found],
            label=row,
            capsize=2,
        )
    axes.set_xticks(
        [i + 0.4 - width / 2 for i in range(len(panel.columns))],
        [f"{name}\n{group}" for group, name in panel.columns],
    )
    axes.set_title(f"{table.title}\n{panel.caption}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.2))
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
