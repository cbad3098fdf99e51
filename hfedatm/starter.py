"""Write a starter project from the files in ``templates/starter``."""

from __future__ import annotations

import json
import keyword
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from hfedatm.base.errors import UserError
from hfedatm.base.resolving import all_keys

LONGEST_NAME = 32  # Flower's limit for an app


def write_project(folder: Path) -> list[Path]:
    """Write the project into a new or empty folder and return its files.

    The folder's name becomes the project's name and, with underscores for hyphens, the package's
    name.
    """
    project, package = _names(folder.resolve().name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"init: {folder} exists and is not an empty folder; choose another name")
    starter = Environment(
        loader=PackageLoader("hfedatm", "templates/starter"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # code, not HTML
    )
    names = {"project": project, "package": package, "flwr": version("flwr")}
    names["hfedatm"] = version("hfedatm")
    settings = yaml.safe_load(starter.get_template("config.yaml.j2").render(names))
    # Flower takes `-c key=value` only for keys the project declares: declare them all.
    config = {key: json.dumps(settings.get(key, "")) for key in all_keys()}
    written = []
    for template in sorted(starter.list_templates(extensions=["j2"])):
        name = template.removesuffix(".j2").replace("PACKAGE", package)
        path = folder / (".gitignore" if name == "gitignore" else name)
        text = starter.get_template(template).render(names, config=config)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"init: cannot write {path}: {error.strerror}") from None
        written.append(path)
    return written


def _names(folder: str) -> tuple[str, str]:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", folder) or len(folder) > LONGEST_NAME:
        raise UserError(
            f"init: {folder!r} cannot name a Flower App; begin with a letter, then letters, digits "
            f"and hyphens, at most {LONGEST_NAME} in all"
        )
    project = folder.lower()
    package = project.replace("-", "_")
    if keyword.iskeyword(package) or find_spec(package) is not None:
        raise UserError(
            f"init: Python already has something called {package!r}; choose another name"
        )
    return project, package
