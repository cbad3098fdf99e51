"""Render our Helm chart without helm: its few Go constructs are translated to Jinja's.

The chart uses values, ``if``, ``else``, ``eq``, ``ne``, ``indent`` and ``toYaml`` and nothing else;
anything else is an error here, so that the chart stays as simple as this renderer.
"""

import re
from pathlib import Path

import jinja2
import yaml

_ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_VALUE = r"\.Values((?:\.\w+)+)"


def render(chart: Path, **given: object) -> str:
    """Return what ``helm template`` prints for a chart and some values."""
    values = yaml.safe_load((chart / "values.yaml").read_text())
    unknown = given.keys() - values.keys()
    assert not unknown, f"values.yaml has no {unknown}"
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    environment.filters |= {"indent": _indent, "toYaml": _to_yaml}
    parts = []
    for file in sorted((chart / "templates").glob("*.yaml")):
        template = environment.from_string(_ACTION.sub(_translate, file.read_text()))
        parts.append(template.render(Values=values | given))
    return "---\n".join(parts)


def _indent(text: str, width: int) -> str:
    return "\n".join(" " * width + line for line in text.split("\n"))


def _to_yaml(value: object) -> str:
    return yaml.safe_dump(value, sort_keys=True).rstrip("\n")


def _translate(action: re.Match[str]) -> str:
    left, said, right = action.groups()
    rules = {
        rf"{_VALUE}": r"{{ Values\1 }}",
        rf"{_VALUE} \| indent (\d+)": r"{{ Values\1 | indent(\2) }}",
        rf"toYaml {_VALUE} \| indent (\d+)": r"{{ Values\1 | toYaml | indent(\2) }}",
        rf"if {_VALUE}": r"{% if Values\1 %}",
        rf'if eq {_VALUE} "(\w+)"': r'{% if Values\1 == "\2" %}',
        rf'if ne {_VALUE} "(\w+)"': r'{% if Values\1 != "\2" %}',
        rf"else if {_VALUE}": r"{% elif Values\1 %}",
        r"else": r"{% else %}",
        r"end": r"{% endif %}",
    }
    for pattern, ours in rules.items():
        if found := re.fullmatch(pattern, said):
            text = found.expand(ours)
            return text[:2] + left + text[2:-2] + right + text[-2:]
    raise AssertionError(f"the chart uses {said!r}, which this renderer does not know")
