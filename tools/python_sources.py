"""Definitions and signatures in Python sources, found by reading: nothing is imported, so nothing need be installed."""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.Module | ast.ClassDef | Function | ast.stmt
STAR = re.compile(r"^\s*from (\.*)(\S*) import \*", re.MULTILINE)
MODULE_FILES = (".py", "/__init__.py", ".pyi", "/__init__.pyi")  # torch describes its C++ parts in stubs
INCOMPLETE_STUBS = {"ray._raylet"}


def of_folder(folder: Path) -> Callable[[str], str | None]:
    """Reads the files below a folder, such as site-packages, by their paths in it."""

    def read(path: str) -> str | None:
        return (folder / path).read_text() if (folder / path).is_file() else None

    return read


@dataclass(frozen=True)
class Signature:
    """Names of parameters in order, and those without a default; `more` takes any other."""

    names: tuple[str, ...]
    required: frozenset[str]
    more: bool = False

    @classmethod
    def of(cls, function: Function, *, is_method: bool) -> Signature:
        arguments = function.args
        positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        required = positional[: len(positional) - len(arguments.defaults)]
        keywords = [argument.arg for argument in arguments.kwonlyargs]
        required += [name for name, value in zip(keywords, arguments.kw_defaults, strict=True) if value is None]
        static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
        first = positional[:1] if is_method and not static else []
        names = [name for name in (*positional, *keywords) if name not in first]
        more = bool(arguments.kwarg or arguments.vararg)
        return cls(tuple(names), frozenset(required) - set(first), more)

    def takes_calls_of(self, other: Signature) -> bool:
        """Whether a method with this signature may stand for one with the other, whose callers give it by position."""
        return self.more or other.more or len(self.required) <= len(other.names) <= len(self.names)

    def problems(self, call: ast.Call) -> Iterator[str]:
        keywords = [keyword.arg for keyword in call.keywords]
        unpacked = None in keywords or any(isinstance(argument, ast.Starred) for argument in call.args)
        given = {*self.names[: len(call.args)], *(name for name in keywords if name)}
        unknown = sorted(given - set(self.names))
        if unknown and not self.more:
            yield f"has no parameter {', '.join(unknown)}"
        if len(call.args) > len(self.names) and not self.more:
            yield f"takes {len(self.names)} arguments, not {len(call.args)}"
        if not unpacked and (missing := sorted(self.required - given)):
            yield f"needs {', '.join(missing)}"


@dataclass(frozen=True)
class Found:
    """Where a name is defined. `nodes` are several if it is overloaded; one that is no definition hides what it is."""

    module: str
    nodes: tuple[Definition, ...]

    @property
    def node(self) -> Definition:
        return self.nodes[0]


@functools.cache
def parsed(text: str) -> ast.Module:
    """The tree of a module; the garbage collector would visit what stays again and again, for most of the time."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.freeze()
        gc.enable()


class Sources:
    """The modules that `read` gives by their paths, as `vllm/outputs.py`; it returns None where there is no file."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read
        self._texts: dict[str, str | None] = {}
        self._trees: dict[str, ast.Module] = {}
        self._packages: set[str] = set()
        self._stubs: set[str] = set()
        self._found: dict[str, Found | None] = {}

    def _text(self, module: str) -> str | None:
        if module not in self._texts:
            self._texts[module] = None
            for ending in MODULE_FILES:
                if (text := self._read(module.replace(".", "/") + ending)) is not None:
                    self._texts[module] = text
                    self._packages |= {module} if "__init__" in ending else set()
                    self._stubs |= {module} if ".pyi" in ending else set()
                    break
        return self._texts[module]

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees and (text := self._text(module)) is not None:
            self._trees[module] = parsed(text)
        return self._trees.get(module)

    def find(self, name: str) -> Found | None:
        """What defines `package.module.Name` or `package.module.Class.method`, through imports; None if nothing does.

        An attribute of something whose class is not known is found with that something.
        """
        if name not in self._found:
            self._found[name] = None  # while it is searched for: modules may import each other
            self._found[name] = self._search(name)
        return self._found[name]

    def _search(self, name: str) -> Found | None:
        if (tree := self._tree(name)) is not None:
            return Found(name, (tree,))
        owner, _, last = name.rpartition(".")
        found = self.find(owner) if owner else None
        match found and found.node:
            case ast.Module():
                assert found is not None
                return self._in_module(found.module, last)
            case ast.ClassDef() as node:
                assert found is not None
                return self._in_class(found.module, node, last)
        return found

    def _in_module(self, module: str, last: str) -> Found | None:
        if self._text(f"{module}.{last}") is not None:
            return self.find(f"{module}.{last}")
        text = self._text(module)
        assert text is not None
        named = re.search(rf"\b{last}\b", text) is not None  # a look at the tree takes longer
        if named and (found := self._named_in_module(module, last)):
            return found
        for dots, where in STAR.findall(text):
            original = self._imported_from(module, ast.ImportFrom(where, [], len(dots)))
            if self._text(original) is not None and (found := self.find(f"{original}.{last}")):
                return found
        # such as the attributes that DeepSpeed gives to parameters, or what a function of the module makes when asked
        hidden = named and ("\ndef __getattr__(" in text or _is_set_in(self._tree(module), last))
        return Found(module, (ast.Pass(),)) if hidden or module in INCOMPLETE_STUBS else None

    def _named_in_module(self, module: str, last: str) -> Found | None:
        tree = self._tree(module)
        assert tree is not None
        if defined := _definitions(tree).get(last):
            return Found(module, tuple(defined))
        for node in _statements(tree):
            match node:
                case ast.ImportFrom():
                    where = self._imported_from(module, node)
                    originals = [alias.name for alias in node.names if (alias.asname or alias.name) == last]
                    if originals and (found := self._elsewhere(module, f"{where}.{originals[0]}", node)):
                        return found
                case ast.Import():
                    for alias in node.names:
                        original = alias.name if alias.asname else alias.name.partition(".")[0]
                        if (alias.asname or original) == last and (found := self._elsewhere(module, original, node)):
                            return found
        return None

    def _elsewhere(self, module: str, original: str, node: ast.stmt) -> Found | None:
        """What an import of the module names; the import itself if it is from a package that is not in the sources."""
        if original.split(".")[0] != module.split(".")[0]:
            return Found(module, (node,))
        return self.find(original)

    def _in_class(self, module: str, node: ast.ClassDef, last: str) -> Found | None:
        if defined := _definitions(node).get(last):
            return Found(module, tuple(defined))
        known = True
        for base in node.bases:
            found = self.find(f"{module}.{ast.unparse(base).split('[')[0]}")
            if found is None or not isinstance(found.node, ast.ClassDef):
                known = False  # a class of another package may have it
            elif inherited := self._in_class(found.module, found.node, last):
                return inherited
        hidden = not known or "__getattr__" in _definitions(node) or _is_set_in(node, last)
        return Found(module, (ast.Pass(),)) if hidden else None

    def _imported_from(self, module: str, node: ast.ImportFrom) -> str:
        """The full name of the module that a module imports from."""
        if not node.level:
            return node.module or ""
        is_package = module in self._packages
        package = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
        return ".".join([*package, *([node.module] if node.module else [])])

    def abstract_methods(self, name: str) -> set[str]:
        """The methods that a subclass of this class must define."""
        found = self.find(name)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return set()
        inherited = set().union(
            *(self.abstract_methods(f"{found.module}.{ast.unparse(base).split('[')[0]}") for base in found.node.bases)
        )
        own = [
            (item, [ast.unparse(x) for x in item.decorator_list])
            for item in found.node.body
            if isinstance(item, Function)
        ]
        abstract = {item.name for item, decorators in own if any(x.endswith("abstractmethod") for x in decorators)}
        return inherited - {item.name for item, _ in own} | abstract

    def signatures(self, name: str) -> list[Signature]:
        """Of a function, of a class's constructor, or of a method; none if the sources do not tell."""
        found = self.find(name)
        match found and found.node:
            case ast.ClassDef() as node:
                assert found is not None
                return self._of_constructor(found.module, node)
        owner = self.find(name.rpartition(".")[0])
        is_method = owner is not None and isinstance(owner.node, ast.ClassDef)
        nodes = found.nodes if found else ()
        return [Signature.of(node, is_method=is_method) for node in nodes if isinstance(node, Function)]

    def _of_constructor(self, module: str, node: ast.ClassDef) -> list[Signature]:
        for constructor in ("__init__", "__new__"):
            if items := _definitions(node).get(constructor):
                return [Signature.of(item, is_method=True) for item in items if isinstance(item, Function)]
        inherited: list[Signature] = []
        for base in node.bases:
            found = self.find(f"{module}.{ast.unparse(base).split('[')[0]}")
            if found is not None and isinstance(found.node, ast.ClassDef):
                inherited += self._of_constructor(found.module, found.node)
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item)]
        if not fields or module in self._stubs:  # in a stub they are attributes of a class of C++
            return inherited
        names = [ast.unparse(item.target) for item in fields]
        required = [ast.unparse(item.target) for item in fields if item.value is None]
        for signature in inherited:
            names += signature.names
            required += signature.required
        return [Signature(tuple(names), frozenset(required))]


def _is_set_in(tree: ast.AST | None, name: str) -> bool:
    """Whether something in the tree is given this attribute, or a class of modules defines it."""
    for node in ast.walk(tree or ast.Pass()):
        match node:
            case ast.Attribute(attr=attr, ctx=ast.Store()) if attr == name:
                return True
            case ast.ClassDef(bases=[base, *_]) if ast.unparse(base).endswith("ModuleType"):
                if name in _definitions(node):
                    return True
    return False


@functools.cache
def _statements(tree: ast.Module | ast.ClassDef) -> tuple[ast.stmt, ...]:
    """Those that define names of a module or a class: also below `if`, `try` and `with`, not inside functions."""
    found, waiting = [], deque[ast.AST](tree.body)
    while waiting:
        node = waiting.popleft()
        if isinstance(node, ast.stmt):
            found.append(node)
        if not isinstance(node, Function | ast.ClassDef | ast.expr):
            waiting += ast.iter_child_nodes(node)
    return tuple(found)


@functools.cache
def _definitions(tree: ast.Module | ast.ClassDef) -> dict[str, list[ast.stmt]]:
    definitions: dict[str, list[ast.stmt]] = {}
    for node in _statements(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names = [name]
            case ast.Assign():
                targets = [x for target in node.targets for x in getattr(target, "elts", [target])]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                names = []
        for name in names:
            definitions.setdefault(name, []).append(node)
    return definitions
