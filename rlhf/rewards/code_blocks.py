"""Finds the program among the fenced blocks of an answer; nothing here runs code.

The program is the last block of Python that defines what the tests call (for tests with input and output: that reads
the input and prints), after the earlier blocks that define names it uses; a block is Python by its tag or, without a
tag, if it parses. Where no block is of that kind, it is the last block of Python.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import NamedTuple

from rlhf.rewards.code_tests import Tests

FENCE = re.compile(r"(?P<before>[^`~]*?)(?P<marks>`{3,}|~{3,}+)(?P<info>[^`]*)")  # of a line
LIST_MARKS = " \t>-*+•.)0123456789"
QUOTE = re.compile(r"^[ \t]*>[ ]?")
PYTHON = re.compile(  # python, py3, {.python .numbers}, Python title="a", python:a.py, main.py; not python-repl
    r"[\s{.]*(?:[ci]?py(?:thon|py)?(?:\d[\d.]*)?(?![\w-])|(?:\w+=)?[\"']?[\w./-]+\.py\b)", re.IGNORECASE
)
MARKDOWN = re.compile(r"\s*(?:markdown|md)\b", re.IGNORECASE)  # it has blocks of its own
DEFINED = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
BUILT_IN = frozenset(dir(builtins))
READERS = frozenset(["input", "raw_input", "stdin", "fileinput", "open", "read"])
PRINTERS = frozenset(["print", "stdout", "write"])
MAX_CHARACTERS = 100_000  # code that is read, from the end of an answer: usually 0.1 s, at worst one second


class Block(NamedTuple):
    """A block of Python."""

    text: str
    functions: frozenset[str]  # names of functions and classes, also of assigned ones; not of outputs such as f = 4
    names: frozenset[str]  # all names that it defines, assigns or imports
    needs: frozenset[str]  # other names that it uses
    runs: bool  # its top level calls a function
    reads: bool  # it uses a name of `READERS`
    prints: bool  # it uses a name of `PRINTERS`


def program(answer: str, tests: Tests) -> str | None:
    """The program in an answer, as the module's docstring defines it; None if no block can be one."""
    blocks = list(fenced(answer))
    sizes = accumulate(len(text) for _, text in reversed(blocks))
    blocks = blocks[len(blocks) - sum(size <= MAX_CHARACTERS for size in sizes) :]
    untagged = [text for info, text in blocks if not info.strip()]
    python = [block for info, text in blocks if (block := _python(info, text))]
    if not python:
        return untagged[-1] if untagged else None
    kept, needed = list[Block](), set(tests.functions)
    main = _main(python, tests) if tests.programs else None
    for block in reversed(python):
        given = block.names if kept else block.functions  # a demonstration may import the solution
        if block is main or needed & given:
            kept.insert(0, block)
            needed -= given | BUILT_IN
            needed |= block.needs
    return "\n".join(block.text for block in kept or python[-1:])


def _main(blocks: list[Block], tests: Tests) -> Block:
    """The last block that runs, reads the input (if there is any) and prints; else the last that runs, or the last."""
    no_input = not any(test.stdin.strip() for test in tests.programs)
    return max(
        reversed(blocks), key=lambda block: (block.runs and block.prints and (block.reads or no_input), block.runs)
    )


def imports(code: str, tests: Tests) -> str:
    """The imports of `tests.modules`, and of names in them, that a program lacks; not of names that the tests call."""
    of_name = _imports(tests.modules)
    block = _python("python", code) if of_name else None
    return "\n".join(
        of_name[name] for name in sorted((block.needs if block else set()) - tests.functions) if name in of_name
    )


@cache
def _imports(modules: tuple[str, ...]) -> dict[str, str]:
    """Name -> its import. The last module with a name wins, and a module wins over a name in another one."""
    of_name = dict[str, str]()
    for module in modules:
        public = getattr(import_module(module), "__all__", None) or dir(import_module(module))
        of_name |= {name: f"from {module} import {name}" for name in public if not name.startswith("_")}
    return of_name | {module: f"import {module}" for module in modules}


def fenced(answer: str) -> Iterator[tuple[str, str]]:
    """The info string and the content of each closed block (CommonMark 0.31, 4.5).

    A block may begin after a mark of a list or quotation and, if its tag is Python, after other words of the line.
    """
    opened, lines = None, list[str]()
    for line in answer.split("\n"):
        fence = FENCE.fullmatch(line)
        if opened is None:
            begins = fence and (not fence["before"].strip(LIST_MARKS) or PYTHON.match(fence["info"]))
            opened, lines = fence if begins and not MARKDOWN.match(fence["info"]) else None, []  # type: ignore[index]
        elif fence and _closes(fence, opened):
            text = "".join(f"{QUOTE.sub('', each) if '>' in opened['before'] else each}\n" for each in lines)
            yield opened["info"], textwrap.dedent(text) if text[:1].isspace() else text
            opened = None
        else:
            lines.append(line)


def _closes(fence: re.Match[str], opened: re.Match[str]) -> bool:
    """A fence that is indented further belongs to the content: to a docstring."""
    is_bare = not fence["info"].strip() and not fence["before"].strip(" \t>")
    return is_bare and fence["marks"].startswith(opened["marks"]) and len(fence["before"]) <= len(opened["before"]) + 3


def _python(info: str, text: str) -> Block | None:
    """A block by its tag and content; None if it is not Python."""
    if info.strip() and not PYTHON.match(info):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        if not info.strip():
            return None
        words, defined = set(re.findall(r"\w+", text)), frozenset(DEFINED.findall(text))
        reads, prints = (not words.isdisjoint(names) for names in (READERS, PRINTERS))
        return Block(text, defined, defined, frozenset(), runs=True, reads=reads, prints=prints)
    functions, names, used, attributes, bound = (set[str]() for _ in range(5))
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(body=[ast.Expr(ast.Constant()) | ast.Pass()]):
                pass  # a signature that is quoted
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                functions.add(name)
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=value):
                functions |= {name} if isinstance(value, ast.Lambda | ast.Name | ast.Attribute | ast.Call) else set()
            case ast.Name(name, ast.Load()):
                used.add(name)
            case ast.Name(name):
                names.add(name)
            case ast.alias(name, alias):
                names.add(alias or name.partition(".")[0])
            case ast.arg(name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.Attribute(attr=name):
                attributes.add(name)
    names |= functions
    return Block(
        text,
        functions=frozenset(functions),
        names=frozenset(names),
        needs=frozenset(used - names - bound - BUILT_IN),
        runs=any(map(_runs, tree.body)),
        reads=not READERS.isdisjoint(used | names | attributes),
        prints=not PRINTERS.isdisjoint(used | names | attributes),
    )


def _runs(statement: ast.stmt) -> bool:
    is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return not is_definition and any(isinstance(node, ast.Call) for node in ast.walk(statement))
