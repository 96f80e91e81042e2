"""The parts of other packages that they do not promise to keep: the table of docs/upgrading.md, and our uses of such.

A use is an import or an attribute whose name begins with an underscore, a keyword argument like that, an assignment
to something of another package, or a flag of Ray's C++ in the environment.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/upgrading.md"
FOLDERS = ("rlhf", "launch", "docker", "tools")
# documented, although their names begin with an underscore
DOCUMENTED = {"_exit", "_getframe", "_replace", "_asdict"}
# settings of torch that its documentation tells to assign
SETTINGS = {"torch.utils.deterministic.fill_uninitialized_memory"}
RAY_FLAG = re.compile(r"RAY_[a-z]\w+")


@dataclass(frozen=True)
class Row:
    """A row of the table: names of private parts, our files that use them, and tests that fail when they are gone."""

    names: tuple[str, ...]
    files: tuple[str, ...]
    tests: tuple[str, ...]


def rows() -> list[Row]:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    table = [row for row in cells if len(row) == 5 and row[0].startswith("`")]
    return [Row(*(tuple(re.findall(r"`([^`]+)`", row[i])) for i in (0, 1, 4))) for row in table]


def uses() -> Iterator[tuple[str, str]]:
    """Each use of a private part: our file, and the name as far as it can be told, `._hp_mapping` for any object's."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    own = set().union(*map(_own_names, trees.values()))
    for file, tree in trees.items():
        for name in uses_of(tree, own):
            yield file, name


def _own_names(tree: ast.Module) -> set[str]:
    """Names that our classes and functions have themselves."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.arg(arg=name):
                names.add(name)
    return names


def uses_of(tree: ast.Module, own: set[str]) -> Iterator[str]:
    names = dict(imported(tree))
    for node in ast.walk(tree):  # other names of what is imported: `module: Any = ops`
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Name(id=other)) if other in names:
                names[name] = names[other]

    def full(node: ast.expr) -> str:
        head, _, rest = ast.unparse(node).partition(".")
        return f"{names[head]}.{rest}" if head in names else f".{ast.unparse(node).rpartition('.')[2]}"

    def foreign(node: ast.expr) -> bool:
        name = full(node)
        return not name.startswith(".") and name.split(".")[0] not in sys.stdlib_module_names and name not in SETTINGS

    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names if _is_private(alias.name))
            case ast.ImportFrom():
                yield from (name for _, name in _imported_by(node) if _is_private(name))
            case ast.Attribute(attr=attr):
                if _is_private(attr) and attr not in own | DOCUMENTED:
                    yield full(node)
            case ast.keyword(arg=str(arg)) if _is_private(arg) and arg not in own:
                yield f".{arg}"
            case ast.Constant(value=str(text)) if RAY_FLAG.fullmatch(text):
                yield text
        match node:
            case ast.Assign():
                targets = [x for target in node.targets for x in getattr(target, "elts", [target])]
                targets = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
                yield from (full(x) for x in targets if isinstance(x, ast.Attribute) and foreign(x))
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str(attr)), _]) if foreign(
                owner
            ):
                yield f"{full(owner)}.{attr}".replace("..", ".")


def _is_private(name: str) -> bool:
    return any(re.fullmatch(r"_(?!_).*", part) for part in name.split("."))


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Local name -> full name of what a file imports from other packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imported_by(node)


def _imported_by(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        pairs = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        yield from ((name, whole if name != whole.split(".")[0] else name) for name, whole in pairs)
    elif (node.module or "").split(".")[0] not in ("rlhf", "__future__"):
        yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
