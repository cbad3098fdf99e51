"""Write the blocks of pyproject.toml that follow from settings and dependencies.

    python tools/write_pyproject.py            # write them
    python tools/write_pyproject.py --check    # say whether they are stale

`[tool.flwr.app.config]` declares every setting, because ``flwr run -c`` changes declared keys only.
`[tool.uv]` names every dependency, so that Flower fetches none of them again for a run.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from hfedatm.base.describing import describe
from hfedatm.base.resolving import all_keys
from hfedatm_files import write_text

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
COMMAND = "make pyproject"


def up_to_date(text: str) -> str:
    """Return the text of pyproject.toml with both blocks as they should be."""
    text = _with_block(text, "tool.flwr.app.config", _config())
    return _with_block(text, "tool.uv", _overrides(text))


def _config() -> str:
    rows = {row["key"]: row for row in describe()}
    lines = []
    for key in all_keys():
        default = f"{rows[key]['default']!r}"
        if key == "preset":
            default += ", a row of configs/master-table.yaml"
        lines.append(f"{f'{key} = ' + chr(34) * 2:<27} # {default}")
    return "\n".join(lines) + "\n"


def _overrides(text: str) -> str:
    names = [
        re.split(r"[\[<>=!~; ]", dependency)[0]
        for dependency in tomllib.loads(text)["project"]["dependencies"]
    ]
    lines = "".join(f"    \"{name}; sys_platform == 'never'\",\n" for name in names)
    return f"override-dependencies = [\n{lines}]\n"


def _with_block(text: str, table: str, content: str) -> str:
    """Replace the lines between a table's head and the empty line after it."""
    pattern = rf"(^\[{re.escape(table)}\]\n).*?(?=^$)"
    replaced, count = re.subn(
        pattern, lambda found: found[1] + content, text, flags=re.MULTILINE | re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"pyproject.toml has {count} tables [{table}] that end in an empty line")
    return replaced


def main() -> None:
    """Write the blocks, or with ``--check`` only compare them."""
    text = PYPROJECT.read_text(encoding="utf-8")
    wanted = up_to_date(text)
    if text == wanted:
        print("pyproject.toml is up to date")
    elif "--check" in sys.argv[1:]:
        raise SystemExit(f"pyproject.toml is stale: run {COMMAND}")
    else:
        write_text(PYPROJECT, wanted)
        print("pyproject.toml is written")


if __name__ == "__main__":
    main()
