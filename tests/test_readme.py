"""The README's config is valid; the files and targets that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf.config.cli import PROGRAMS
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.reward import MathOptions

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
(BLOCK,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)


def test_the_config_is_valid_and_asks_for_the_box_that_its_reward_reads(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(BLOCK)
    config = load_config(GRPOConfig, [str(tmp_path / "mine.yaml")])
    (part,) = config.reward.parts
    assert (part.name, MathOptions(**part.options).steps) == ("math", ("box",))
    assert r"\boxed{}" in (config.data.prompt_suffix or "")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"configs/\w+\.yaml", README))))
def test_the_configs_are_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_the_tests_are_there() -> None:
    named = set(re.findall(r"`((?:\w+/)?test_\w+\.py)`", README))
    assert named
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []


def test_the_files_in_which_to_add_something_are_there() -> None:
    named = re.findall(r"`(\w+/\w+\.py)`", README.partition("To add a reward")[2])
    assert named
    assert [name for name in named if not (ROOT / "rlhf" / name).is_file()] == []


def test_the_targets_and_programs_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.MULTILINE))
    assert {"quickstart", "test"} <= named
    assert named <= targets
    for program in re.findall(r"python -m (rlhf\.\w+)", README):
        path = program.replace(".", "/")
        assert (ROOT / f"{path}.py").is_file() or (ROOT / path / "__main__.py").is_file()
    commands = re.findall(r"(?:^|`)rlhf ([a-z-]+)", README, flags=re.MULTILINE)
    assert {"grpo", "ppo", "doctor", "report"} <= set(commands) <= PROGRAMS.keys()


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_pages_that_messages_and_configs_name_are_there() -> None:
    folders = [ROOT / name for name in ("rlhf", "configs", "launch", "benchmarks", "tools")]
    texts = [
        path.read_text() for folder in folders for path in folder.rglob("*.*") if path.suffix in (".py", ".yaml", ".sh")
    ]
    named = set(re.findall(r"docs/[\w/]+\.md", "".join(texts)))
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).is_file()] == []
