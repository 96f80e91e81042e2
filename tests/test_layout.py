"""What every part of the package may know, read from the syntax trees, and what no committed file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rlhf"
FILES = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = [p for p in PACKAGE.glob("*.py") if 'if __name__ == "__main__":' in p.read_text()]

# The only files that may import ray, vllm or deepspeed when they are imported themselves; others do so in functions.
ON_THE_STACK = {
    "cluster/actors.py": "ray",
    "cluster/cluster.py": "ray",
    "cluster/engine_choice.py": "ray",
    "cluster/heartbeat.py": "ray",
    "cluster/actor_start.py": "ray",
    "cluster/session.py": "ray",
    "cluster/worker_actors.py": "ray",
    "learner/deepspeed_settings.py": "deepspeed",
    "learner/sequence_parallel.py": "deepspeed",
    "sampling/cache_meter.py": "vllm",
    "sampling/endpoint.py": "vllm",
    "sampling/engine.py": "vllm",
    "sampling/messages.py": "vllm",
    "weights/receivers.py": "vllm",
}
STACK = {"ray", "vllm", "deepspeed"}

# The packages from the bottom up. Each imports packages of lower levels alone, so those of one level never meet.
LEVELS = (
    {"types"},
    {"config", "algo", "answers"},
    {"log", "weights", "processes"},
    {"data", "rewards", "sampling", "learner", "step"},
    {"environments"},
    {"rollout"},
    {"check"},
    {"cluster"},
    {"run"},
    {"check.doctor"},
    {"api"},
)
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(module: str) -> str:
    """rlhf.learner.policy -> learner; the doctor's checks use a run, so they are a part of their own."""
    return "check.doctor" if module.startswith("rlhf.check.doctor") else module.split(".")[1]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(path: Path, *, inside_functions: bool) -> Iterator[str]:
    """Modules that a file imports, when it is imported itself or ever; not those for the type checker alone."""
    waiting: list[ast.AST] = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: a relative import; name the module in full"
            assert node.module is not None
            for alias in node.names:  # `from rlhf.algo import kl` is an import of rlhf.algo.kl
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            waiting += node.orelse
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def packages(path: Path, *, inside_functions: bool = False) -> set[str]:
    return {module.split(".")[0] for module in imports(path, inside_functions=inside_functions)}


def own_imports(path: Path) -> set[str]:
    """Modules of this package that a file ever imports."""
    return {m for m in imports(path, inside_functions=True) if m.split(".")[0] == "rlhf" and m != "rlhf"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_files_of_the_stack_import_it_when_they_are_imported(path: Path) -> None:
    found = packages(path) & STACK
    assert found == ({ON_THE_STACK[name_of(path)]} if name_of(path) in ON_THE_STACK else set())


def test_the_files_of_the_stack_are_there() -> None:
    assert ON_THE_STACK.keys() <= {name_of(path) for path in FILES}


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "algo"], ids=name_of)
def test_algorithms_need_torch_alone_and_never_the_config(path: Path) -> None:
    allowed = {"torch", "numpy", "rlhf", "__future__", *sys.stdlib_module_names}
    allowed |= {"triton"} if path.name == "kernels.py" else set()  # which torch brings where there is a GPU
    assert packages(path, inside_functions=True) <= allowed
    assert {part_of(module) for module in own_imports(path)} <= {"algo", "types"}


def test_schedules_need_not_even_torch() -> None:
    assert packages(PACKAGE / "algo/schedules.py", inside_functions=True) <= {"__future__", *sys.stdlib_module_names}


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "answers"], ids=name_of)
def test_the_comparison_of_answers_stands_alone(path: Path) -> None:
    assert packages(path, inside_functions=True) <= {"mpmath", "rlhf", "__future__", *sys.stdlib_module_names}
    assert {part_of(module) for module in own_imports(path)} <= {"answers"}


# What the process of an environment imports: it may run under an interpreter that has no package of ours.
IN_ANOTHER_INTERPRETER = (
    "calculator", "contract", "faults", "places", "program", "python_tool", "schema", "seeding", "serve",
    *(f"adapters/{path.stem}" for path in (PACKAGE / "environments/adapters").glob("*.py")),
)  # fmt: skip
NEXT_TO_VERIFIERS = {"adapters/verifiers_parts": {"verifiers", "mcp", "httpx"}}  # loaded once the package is found


@pytest.mark.parametrize("name", IN_ANOTHER_INTERPRETER)
def test_the_process_of_an_environment_needs_the_standard_library_alone(name: str) -> None:
    path = PACKAGE / f"environments/{name}.py"
    theirs = NEXT_TO_VERIFIERS.get(name, set())
    assert packages(path, inside_functions=True) <= {"rlhf", *theirs, *sys.stdlib_module_names}
    allowed = {"rlhf.environments", "rlhf.environments.adapters"}
    allowed |= {f"rlhf.environments.{other.replace('/', '.')}" for other in IN_ANOTHER_INTERPRETER}
    assert {module for module in own_imports(path) if part_of(module) != "processes"} <= allowed
    assert packages(PACKAGE / "environments/__init__.py", inside_functions=True) == set()


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "processes"], ids=name_of)
def test_processes_need_the_standard_library_alone(path: Path) -> None:
    assert packages(path, inside_functions=True) <= {"rlhf", "__future__", *sys.stdlib_module_names}
    assert {part_of(module) for module in own_imports(path)} <= {"processes"}


def test_importing_algo_imports_nothing() -> None:
    assert packages(PACKAGE / "algo/__init__.py", inside_functions=True) == set()


def test_the_top_level_holds_programs_and_the_types_that_flow() -> None:
    programs = {module_of(p).removeprefix("rlhf.") for p in PROGRAMS}
    packages_there = {part_of(module_of(p)) for p in FILES if p.parent != PACKAGE}
    assert packages_there == (LEVEL.keys() | {"report"}) - {"types"}
    assert {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"} == programs | {"types"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_package_imports_only_packages_of_lower_levels(path: Path) -> None:
    part = part_of(module_of(path)) if path != PACKAGE / "__init__.py" else ""
    if part in LEVEL:
        below = {package for package, level in LEVEL.items() if level < LEVEL[part]}
        programs = {part_of(module_of(path)) for path in PROGRAMS} if part == "api" else set()
        assert {part_of(module) for module in own_imports(path)} <= below | {part} | programs


def test_nothing_but_the_entry_from_python_imports_a_program() -> None:
    programs = {module_of(p) for p in PROGRAMS}
    assert {"rlhf.grpo", "rlhf.quickstart"} <= programs
    imported = {module for path in FILES if path.parent.name != "api" for module in own_imports(path)}
    assert not programs & imported


def test_every_module_says_its_job() -> None:
    silent = [name_of(p) for p in FILES if p.read_text().strip() and ast.get_docstring(tree_of(p)) is None]
    assert silent == []


def test_every_line_for_a_terminal_goes_out_through_say_or_rich() -> None:
    calls = {
        name_of(path)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Name) and node.id == "print"
    }
    # JSON for the doctor, and a line for an actor's log
    assert calls == {"config/printing.py", "check/doctor/nodes.py", "cluster/heartbeat.py"}


# --- committed files ---

PLACES_OF_ONE_MACHINE = re.compile(r"(?<![\w./-])/(?:work|root|home|opt|Users|mnt|scratch)/\w")
REGISTRY_HOSTS = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|conda\.anaconda\.org")
PATHS_UPWARD = re.compile(r"(?<![\w.])(?:\.\./)+[\w./-]*\w")


@cache
def committed() -> tuple[Path, ...]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file())


def places(pattern: re.Pattern[str], *, outside: str = "") -> Iterator[tuple[Path, str, str]]:
    """(file, found text, where it stands) over the committed text files."""
    for path in committed():
        name = path.relative_to(ROOT).as_posix()
        if path == Path(__file__) or (outside and name.startswith(outside)):
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, start=1):
            for found in pattern.findall(line):
                yield path, found, f"{name}:{number}: {line.strip()[:120]}"


def test_no_committed_file_names_a_place_of_one_machine() -> None:
    assert [where for _, _, where in places(PLACES_OF_ONE_MACHINE)] == []


def test_no_committed_file_names_the_host_of_a_registry() -> None:
    assert [where for _, _, where in places(REGISTRY_HOSTS)] == []


def test_paths_upward_end_in_the_repository() -> None:
    outside = [
        where
        for path, found, where in places(PATHS_UPWARD, outside="tests/")
        if not (path.parent / found).exists() or ROOT not in (path.parent / found).resolve().parents
    ]
    assert outside == []
