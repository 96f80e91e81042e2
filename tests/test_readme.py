"""The README's config is valid; the files, targets and programs that it and AGENTS.md name are there."""

from __future__ import annotations

import re
import signal
import tomllib
from pathlib import Path

import pytest

from rlhf.command import OTHERS
from rlhf.config import cli
from rlhf.config.cli import PROGRAMS
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.reward import MathOptions

ROOT = Path(__file__).parent.parent
README, AGENTS, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md"))
(BLOCK,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)


def test_the_config_is_valid_and_asks_for_the_box_that_its_reward_reads(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(BLOCK)
    config = load_config(GRPOConfig, [str(tmp_path / "mine.yaml")])
    (part,) = config.reward.parts
    assert (part.name, MathOptions(**part.options).steps) == ("math", ("box",))
    assert r"\boxed{}" in (config.data.prompt_suffix or "")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"configs/\w+\.yaml", README + AGENTS))))
def test_the_configs_are_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_the_tests_are_there() -> None:
    named = set(re.findall(r"`((?:\w+/)?test_\w+\.py)`", (ROOT / "docs/properties.md").read_text()))
    assert named
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []


def test_the_files_in_which_to_add_something_are_there() -> None:
    named = re.findall(r"`(\w+/\w+\.\w+)`", CONTRIBUTING)
    assert {"rewards/registry.py", "algo/kl.py"} <= set(named)
    places = [[ROOT / name, ROOT / "rlhf" / name] for name in named]
    assert [here for here, package in places if not (here.is_file() or package.is_file())] == []


@pytest.mark.parametrize("page", [README, AGENTS, CONTRIBUTING], ids=["README", "AGENTS", "CONTRIBUTING"])
def test_the_targets_and_programs_are_there(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^ *|`|; )make ([a-z-]+)", page, flags=re.MULTILINE))
    assert "test" in named
    assert named <= targets
    for program in re.findall(r"python -m (rlhf\.[a-z]\w*)", page):
        path = program.replace(".", "/")
        assert (ROOT / f"{path}.py").is_file() or (ROOT / path / "__main__.py").is_file()
    commands = re.findall(r"(?:^ *|`)rlhf ([a-z-]+)", page, flags=re.MULTILINE)
    assert set(commands) <= PROGRAMS.keys() | OTHERS.keys()


def test_the_files_markers_and_statuses_of_agents_md_are_those_of_the_code() -> None:
    named = re.findall(r"(?<=[` ])((?:rlhf|tests|configs|docs)/[\w/.]+\w)", AGENTS)
    assert {"tests/fake_run.py", "rlhf/algo"} <= set(named)
    assert [name for name in named if not (ROOT / name).exists()] == []
    layout, project = (ROOT / "tests/test_layout.py").read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert all(f"\n{name} = " in layout for name in ("LEVELS", "ON_THE_STACK"))
    (markers,) = re.findall(r"Markers: ([^;]*);", AGENTS)
    known = [marker.partition(":")[0] for marker in project["tool"]["pytest"]["ini_options"]["markers"]]
    assert re.findall(r"`(\w+)`", markers) == known
    rows = re.findall(r"^\| ([\d, ]+) \|", AGENTS, flags=re.MULTILINE)
    ends = [0, cli.RUN_ERROR, cli.USER_ERROR, cli.RESUMABLE, cli.INTERRUPTED, cli.TERMINATED, 128 + signal.SIGHUP]
    assert [int(status) for row in rows for status in row.split(",")] == ends


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


PAGES = [*ROOT.glob("*.md"), *(page for name in ("docs", "recipes", "docker") for page in (ROOT / name).rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_site_shows_every_page_of_docs_and_no_other() -> None:
    """The other pages of the site are added by tools/site_hooks.py."""
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert pages <= set(listed)
    assert [name for name in set(listed) - pages - {"source/index.md"} if not (ROOT / name).is_file()] == []


def test_pages_that_messages_and_configs_name_are_there() -> None:
    folders = [ROOT / name for name in ("rlhf", "configs", "launch", "benchmarks", "tools")]
    texts = [
        path.read_text() for folder in folders for path in folder.rglob("*.*") if path.suffix in (".py", ".yaml", ".sh")
    ]
    named = set(re.findall(r"docs/[\w/]+\.md", "".join(texts)))
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).is_file()] == []
