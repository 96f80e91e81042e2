"""Hooks of mkdocs: what the site of `make site` has besides docs/.

The pages of docs/ and the other Markdown files link to files of this repository, as GitHub shows them. Here each linked
file becomes a page that shows it, so that the site has no dead link and needs no address of a repository. The reference
of Python comes from docstrings, that of the config from its schema.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from rlhf.config.cli import PROGRAMS
from rlhf.config.describe import describe_keys

ROOT = Path(__file__).parent.parent
OUTSIDE = "README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "docker/README.md"  # pages that are not in docs/
LINK = re.compile(r"(\]\()(?!https?:|mailto:)([^)\s#]*)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
LIST_AFTER_TEXT = re.compile(r"^(?![-*|#>]|\d+\. |\s|$)(.*\n)(?=(?:[-*]|\d+\.) )", re.MULTILINE)
MARKERS = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json"}

PYTHON = {
    "Python": ("train", "Trainer", "evaluate_model", "load_config"),
    "Algorithms": (
        "algo.losses",
        "algo.kl",
        "algo.advantages",
        "algo.logprobs",
        "algo.adam",
        "algo.schedules",
        "algo.packing",
    ),
    "What flows": ("types",),
}
OBJECTS = {
    "train": "api.train",
    "Trainer": "api.trainer",
    "evaluate_model": "api.evaluation",
    "load_config": "api.configs",
}


def recipes() -> list[str]:
    """The README of each recipe, by its path in the repository."""
    return [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "recipes").glob("[0-9]*/README.md"))]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages that are made here to the navigation."""
    ladder = [{title(path): path} for path in recipes()]
    reference = [{name: f"reference/{slug(name)}.md"} for name in (*PYTHON, "Keys of the config")]
    for entry in config.nav or []:
        if "Recipes" in entry:
            entry["Recipes"] += ladder
        if "Reference" in entry:
            entry["Reference"] += reference
    return config


def title(path: str) -> str:
    return (ROOT / path).read_text().splitlines()[0].removeprefix("# ")


def slug(name: str) -> str:
    return name.lower().replace(" ", "-")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, the Markdown files outside of docs/, and every file that some page links to."""
    pages = [name for name in (*OUTSIDE, "recipes/README.md", *recipes()) if (ROOT / name).is_file()]
    texts = {name: (ROOT / name).read_text() for name in pages}
    for name, text in texts.items():
        files.append(File.generated(config, place(name), content=text))
    docs = {f"docs/{file.src_uri}" for file in files.documentation_pages() if file.generated_by is None}
    texts |= {name: (ROOT / name).read_text() for name in docs}
    sources = {target for name, text in texts.items() for target in targets(name, text) if target not in texts}
    for source in sorted(sources):
        if (ROOT / source).suffix in (".svg", ".png"):
            if not source.startswith("docs/") and (ROOT / source).is_file():
                files.append(File.generated(config, place(source), abs_src_path=str(ROOT / source)))
        else:
            files.append(File.generated(config, place(source), content=as_page(source)))
    shown = sorted({target for target in sources if place(target).startswith("source/")})
    lines = (f"- [`{source}`]({place(source).removeprefix('source/')})" for source in shown)
    index = "\n".join(["# Source files", "", "Files of the repository to which pages of this site link.", "", *lines])
    files.append(File.generated(config, "source/index.md", content=index))
    for name, parts in PYTHON.items():
        files.append(File.generated(config, f"reference/{slug(name)}.md", content=reference_page(name, parts)))
    files.append(File.generated(config, "site.css", content="td:first-child code { white-space: nowrap; }\n"))
    files.append(File.generated(config, "reference/keys-of-the-config.md", content=keys_page()))
    return files


def place(name: str) -> str:
    """The file of the site for a file or folder of the repository."""
    if name == "README.md":
        return "index.md"
    return name.removeprefix("docs/") if name.endswith((".md", ".svg", ".png")) else f"source/{name}.md"


def targets(name: str, text: str) -> list[str]:
    """The files and folders of the repository to which a page links, by their paths in it."""
    found = [target for _, target, _ in LINK.findall(CODE.sub("", text)) if target]
    return [posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) for target in found]


def as_page(source: str) -> str:
    """A page that shows a file, or the names of the files in a folder."""
    path = ROOT / source
    if path.is_dir():
        names = (child.name for child in sorted(path.iterdir()) if not child.name.startswith(("__pycache__", ".")))
        return "\n".join(
            [f"# {source}", "", "A folder of the repository, with these files:", "", *(f"- `{n}`" for n in names)]
        )
    return f"# {source}\n\n``````{MARKERS.get(path.suffix, '')}\n{path.read_text()}\n``````\n"


def reference_page(name: str, parts: tuple[str, ...]) -> str:
    lines = [f"# {name}", ""]
    for part in parts:
        where = f"{OBJECTS[part]}.{part}" if part in OBJECTS else part
        lines += [f"::: rlhf.{where}", "    options:", f"      heading: rlhf.{part}", ""]
    return "\n".join(lines)


def keys_page() -> str:
    """Every key of each program that trains, as `--help` lists them."""
    lines = ["# Keys of the config", ""]
    for name, program in PROGRAMS.items():
        if program.config is not None:
            lines += [f"## rlhf {name}", "", "| key | default | type | meaning |", "|---|---|---|---|"]
            for key in describe_keys(program.config):
                default = "required" if key.default is None else f"`{key.default}`"
                cells = (f"`{key.name}`", default, key.kind, key.description)
                lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
            lines.append("")
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the pages of this site, and lists begin as GitHub lets them, without an empty line."""
    name = repository_name(page.file)

    def link(found: re.Match[str]) -> str:
        opening, target, anchor = found.groups()
        if not target:
            return found[0]
        there = place(posixpath.normpath(posixpath.join(posixpath.dirname(name), target)))
        return f"{opening}{posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or '.')}{anchor or ''}"

    if page.file.src_uri.startswith(("source/", "reference/")):
        return markdown
    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [outside_code(markdown[end : code.start()], link), code[0]]
        end = code.end()
    return "".join([*parts, outside_code(markdown[end:], link)])


def outside_code(text: str, link: Any) -> str:
    return LIST_AFTER_TEXT.sub(r"\1\n", LINK.sub(link, text))


def repository_name(file: File) -> str:
    """The path in the repository of a page of the site."""
    if file.src_uri == "index.md":
        return "README.md"
    return file.src_uri if file.generated_by else str(PurePosixPath("docs", file.src_uri))
