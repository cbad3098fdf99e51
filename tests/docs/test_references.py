"""Every client method, server rule and robust rule says which publication it follows."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    file
    for folder in ("client_app/methods", "server_app/rules", "hfedatm_core/robust/rules")
    for file in sorted((ROOT / folder).glob("[a-z]*.py"))
    # all but the first are this project's own
    if file.stem not in ("base", "none", "record", "one_station")
]
PUBLICATION = re.compile(
    r"arXiv:\d{4}\.\d{4,5}\b|https://doi\.org/10\.\S+|https://openreview\.net/forum\?id=\S+"
    r"|https://openaccess\.thecvf\.com/content/\S+_paper\.html"
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_docstring_names_a_publication(file: Path) -> None:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    assert PUBLICATION.search(docstring), f"{file} names no arXiv id, DOI, OpenReview or CVF page"
