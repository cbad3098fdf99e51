"""What a newcomer meets first: the paper, the words, and a demo that compares."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_screen_names_the_paper_its_authors_and_where_it_is():
    screen = " ".join(README.splitlines()[:20]).replace("> ", "")
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    assert paper["title"].strip() in screen
    for author in paper["authors"]:
        assert author["family-names"] in screen
    assert paper["url"] in screen and paper["identifiers"][0]["value"] in screen


def test_terms_are_explained_where_they_first_occur():
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    for text, term, words in (
        (README, "FOT", "channels are put into one order"),
        (README, "Gram", "which inputs are large together"),
        (tutorial, "λ", "how alike clients are"),
        (tutorial, "FOT", "filter-wise optimal transport"),
    ):
        first = re.sub(r"\s+", " ", text[max(0, text.index(term) - 100) : text.index(term) + 250])
        assert words in first, term


def test_the_demo_runs_both_rules_on_the_same_problem_and_compares_them():
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile[makefile.index("\ndemo:") : makefile.index("\ntest:")]
    assert recipe.count("flwr run . --stream -c '$(DEMO) ") == 2
    assert 'server-rule="avg"' in recipe and 'server-rule="hfedatm"' in recipe
    # by name: a SuperLink that was started elsewhere leaves the results in the app's own folder
    assert "hfedatm compare demo-$$at-avg demo-$$at-hfedatm" in recipe
    assert 'DEMO := target-domain="0" local-epochs=2' in makefile
