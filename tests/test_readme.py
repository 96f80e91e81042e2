"""The README's config is valid and adds up as it says; the files and targets that it names are there."""

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


def test_the_config_is_valid_and_its_arithmetic_is_right(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(BLOCK)
    config = load_config(GRPOConfig, [str(tmp_path / "mine.yaml")])
    rollouts, minibatches = config.rollouts_per_step, config.learner.minibatches_per_epoch
    assert f"= {rollouts} rollouts a step, {minibatches} minibatches of {rollouts // minibatches}" in README
    assert f"= {config.training.total_updates} optimizer steps" in README
    assert config.checkpoint_every is not None


def test_the_config_asks_for_the_box_that_its_reward_reads(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(BLOCK)
    config = load_config(GRPOConfig, [str(tmp_path / "mine.yaml")])
    (part,) = config.reward.parts
    assert (part.name, MathOptions(**part.options).steps) == ("math", ("box",))
    assert r"\boxed{}" in (config.data.prompt_suffix or "")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"configs/\w+\.yaml", README))))
def test_the_configs_are_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_the_tests_are_there() -> None:
    named = set(re.findall(r"test_\w+\.py", README))
    assert named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


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


def test_the_link_targets_are_there() -> None:
    assert [t for t in re.findall(r"\]\(([^)]+)\)", README) if not (ROOT / t).exists()] == []
