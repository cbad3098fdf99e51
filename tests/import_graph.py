"""Which module imports which, read from the modules' text: late imports count, too."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

Graph = dict[str, set[str]]


def sources(root: Path, *packages: str) -> dict[str, str]:
    """Return the text of every module of these packages, by dotted name."""
    found = {}
    for package in packages:
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = file.read_text("utf-8")
    return found


def imports(texts: Mapping[str, str], for_types: bool = True) -> Graph:
    """Return the modules of ``texts`` that each one imports, also late or for types only."""
    graph: Graph = {}
    for name, text in texts.items():
        wanted: set[str] = set()
        for node in _walk(ast.parse(text), for_types):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name}: say from where, not how many dots up"
                whole = node.module or ""
                dotted = (f"{whole}.{alias.name}" for alias in node.names)
                wanted |= {one if one in texts else whole for one in dotted}
        graph[name] = wanted & texts.keys()
    return graph


def _walk(node: ast.AST, for_types: bool) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, for_types)


def cycle(graph: Graph) -> list[str]:
    """Return modules that import each other in a circle, if there are any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
