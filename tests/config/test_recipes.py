"""The recipes of configs/: each loads without warnings, names its paper and is planned in a second of CPU time."""

from __future__ import annotations

import contextlib
import cProfile
import re
from functools import partial
from pathlib import Path

import pytest
import yaml

from rlhf import evaluate, grpo, ppo
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.ppo import PPOConfig
from rlhf.config.suites import suite_values

ROOT = Path(__file__).parents[2]

# files -> arXiv id of the paper
RECIPES: dict[tuple[str, ...], str] = {
    ("dapo.yaml",): "2503.14476",
    ("dapo.yaml", "cispo.yaml"): "2506.13585",
    ("dr_grpo.yaml",): "2503.20783",
    ("dr_grpo.yaml", "reinforce_pp.yaml"): "2501.03262",
    ("rloo.yaml",): "2402.14740",
    ("gspo.yaml",): "2507.18071",
    ("ppo_math.yaml",): "2503.24290",
    ("ppo_rlhf.yaml",): "1909.08593",
}
IDS = [" ".join(files) for files in RECIPES]


def is_ppo(files: tuple[str, ...]) -> bool:
    return files[0].startswith("ppo")


def load(files: tuple[str, ...]) -> GRPOConfig:
    schema = PPOConfig if is_ppo(files) else GRPOConfig
    return load_config(schema, [str(ROOT / "configs" / file) for file in files])


@pytest.mark.parametrize(("files", "paper"), RECIPES.items(), ids=IDS)
def test_a_recipe_loads_without_warnings_and_names_its_paper(files: tuple[str, ...], paper: str) -> None:
    assert not list(load(files).warnings())
    header = (ROOT / "configs" / files[-1]).read_text()
    assert f"arXiv:{paper}" in header.split("\n\n")[0]


@pytest.mark.parametrize("files", [*RECIPES, ("tulu3_8b_math.yaml",)], ids=[*IDS, "tulu3_8b_math.yaml"])
def test_a_recipe_has_no_importance_correction_as_in_its_paper(files: tuple[str, ...]) -> None:
    assert load(files).algo.importance_correction == "none"


@pytest.mark.parametrize("files", RECIPES, ids=IDS)
def test_a_recipe_is_planned_in_few_steps(files: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [part for file in files for part in ("--config", str(ROOT / "configs" / file))]
    profile = cProfile.Profile()
    with profile, contextlib.suppress(ValueError):  # data that is not here
        (ppo if is_ppo(files) else grpo).main([*arguments, "--plan"])
    assert sum(entry.callcount for entry in profile.getstats()) < 4_000_000  # calls; about a second
    output = capsys.readouterr().out
    assert re.search(r"^  optimizer steps, learner +[\d,]+ steps", output, re.MULTILINE)


def test_the_suite_of_mathematics_samples_as_its_papers() -> None:
    values = suite_values("math", ROOT / "configs/suites")
    read = partial(
        load_config, GRPOConfig, contradictions=GRPOConfig.sampling_contradictions, complete=evaluate.complete
    )
    config = read([values], ["model.path=x"])
    assert not list(config.warnings())
    drawn = {name: (each.samples_per_prompt, each.temperature, each.top_p) for name, each in config.evaluations.items()}
    competitions = dict.fromkeys(("aime24", "aime25", "amc23"), (32, 0.6, 0.95))
    assert drawn == {"gsm8k": (1, 0.6, 0.95), "math500": (4, 0.6, 0.95), **competitions}
    assert config.reward.parts[0].name == "math"
    longer = "evaluation.max_response_tokens=32768"
    assert longer in (ROOT / "configs/suites/math.yaml").read_text()
    read([values], ["model.path=x", longer])


def test_dapos_rewards_are_one_and_minus_one_up_to_a_shift_and_the_published_overlong_penalty() -> None:
    """Section 4.1 and equation 13: right and wrong are 2 apart, and the last 4,096 of 20,480 tokens cost up to 1."""
    from rlhf.config.reward import LengthOptions
    from rlhf.rewards.shaping import length_reward

    math, length = load(("dapo.yaml",)).reward.parts
    assert (math.name, math.weight, math.options["mode"]) == ("math", 2.0, "strict")
    options = LengthOptions(**length.options)
    assert [length_reward(n, options) for n in (16_384, 18_432, 20_480)] == [0.0, -0.5, -1.0]
    assert length.weight == 1.0


# --- docs/algorithms.md ---

PAGE = ROOT / "docs/algorithms.md"


def recipes_of_the_page() -> list[dict[str, dict[str, object]]]:
    """The sections of each recipe; lines of one block that begin with the same section are alternatives."""
    text = PAGE.read_text().partition("## The recipes")[2]
    found: list[dict[str, dict[str, object]]] = []
    for block in re.findall(r"(?:^    [a-z]+: [{\[].*\n?)+", text, flags=re.MULTILINE):
        found.append({})
        for line in block.splitlines():
            ((name, values),) = yaml.safe_load(line).items()
            if name in found[-1]:
                found.append({})
            found[-1][name] = values
    return found


def test_the_recipes_of_the_page_load_without_warnings_with_nothing_else_set() -> None:
    recipes = recipes_of_the_page()
    assert len(recipes) == 12
    for sections in recipes:
        schema = PPOConfig if "gamma" in sections["algo"] else GRPOConfig
        needed = {"run": {"dir": "x", "steps": 9}, "model": {"path": "x"}, "data": {"train": "x.jsonl"}}
        config = load_config(schema, [{"reward": ["math"], **needed, **sections}])
        assert not list(config.warnings()), sections
