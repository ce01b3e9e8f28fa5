"""The folders of the package, and what each imports of the others, read from the source.

``python -m tests.support.architecture`` writes the picture into docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "async_wsync"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawn by tests/support/architecture.py -->\n", "<!-- end of the picture -->\n"


def folder_of(path: Path) -> str:
    """``groups/``, ``engines/torch/`` or ``errors``: a folder, or a file that stands beside the folders."""
    parts = path.relative_to(PACKAGE).parts
    return path.stem if len(parts) == 1 else "/".join(parts[:-1]) + "/"


def running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that stand there for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            continue
        yield child
        yield from running(child)


def imports_by_folder() -> dict[str, set[str]]:
    """Each folder, and the folders that its files import when they run."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name in {"__init__.py", "__main__.py"}:
            continue
        own = folder_of(path)
        found[own].update()
        for node in running(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("async_wsync"):
                for alias in node.names:
                    for dotted in (f"{node.module}.{alias.name}", node.module):
                        target = PACKAGE.joinpath(*dotted.split(".")[1:])
                        if target.with_suffix(".py").exists():
                            found[own].add(folder_of(target.with_suffix(".py")))
                            break
                        if target.is_dir() and target != PACKAGE:
                            found[own].add(target.relative_to(PACKAGE).as_posix() + "/")
                            break
    return {folder: used - {folder} for folder, used in found.items()}


def rank(folder: str, graph: dict[str, set[str]]) -> int:
    """How many steps of imports lie below a folder."""
    return 1 + max((rank(used, graph) for used in graph[folder] if used in graph), default=-1)


def picture() -> str:
    """A line a folder, from what everything rests on downwards: how many files, and what it imports."""
    graph = imports_by_folder()
    counts: dict[str, int] = defaultdict(int)
    for path in PACKAGE.rglob("*.py"):
        if path.name not in {"__init__.py", "__main__.py"}:
            counts[folder_of(path)] += 1
    width = max(map(len, graph))
    lines = []
    for folder in sorted(graph, key=lambda name: (rank(name, graph), name)):
        files = f"{counts[folder]:2} files" if folder.endswith("/") else " " * 8
        lines.append(
            f"{folder:<{width}}  {files}  {'<- ' + ' '.join(sorted(graph[folder])) if graph[folder] else ''}".rstrip()
        )
    return "```text\n" + "\n".join(lines) + "\n```\n"


def shown() -> str:
    """The picture that the page has now."""
    match = re.search(re.escape(BEGIN) + "(.*?)" + re.escape(END), PAGE.read_text(), re.DOTALL)
    assert match is not None, "docs/architecture.md has no picture"
    return match.group(1)


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text.replace(BEGIN + shown() + END, BEGIN + picture() + END))
