"""docs/first_run.md and docs/data.md: their configs are valid, and their commands and names exist.

The output of training is held against a run of tests/test_stack_grpo.py, by `documented.check_shown`.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml
from documented import FIRST_RUN, transcript

from rlhf.config.data import DataConfig
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config, validated
from rlhf.data.load import USUAL_COLUMNS
from rlhf.data.templates import CHAT_TEMPLATES

DATA = (FIRST_RUN.parent / "data.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config of the page."""
    folder = tmp_path_factory.mktemp("first")
    (config,) = re.findall(r"```yaml\n(.*?)```", FIRST_RUN.read_text(), flags=re.DOTALL)
    (folder / "mine.yaml").write_text(config)
    return folder


def test_every_command_of_the_page_is_a_program_with_such_arguments(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [line.split() for line in transcript() if line.startswith("rlhf ")]
    assert {"quickstart", "grpo", "show", "report", "export", "evaluate"} <= {words[1] for words in commands}
    for _, program, *arguments in commands:
        with pytest.raises(SystemExit):
            importlib.import_module(f"rlhf.{program}" + ".__main__" * (program == "report")).main(["--help"])
        flags = re.findall(r"(?<!\w)--?\w[\w-]*", capsys.readouterr().out)
        assert {word for word in arguments if word.startswith("-")} <= {*flags}
        overrides = [word for word in arguments if re.match(r"[a-z_]+\.[a-z_.]+=", word)]
        load_config(GRPOConfig, [str(folder / "mine.yaml")], overrides)


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", DATA, flags=re.DOTALL))
def test_the_configs_of_the_page_about_data_are_valid(block: str) -> None:
    config = validated(DataConfig, yaml.safe_load(block)["data"])
    assert config.train


def test_the_page_about_data_names_the_columns_templates_and_formats_that_there_are() -> None:
    for key, columns in USUAL_COLUMNS.items():
        (line,) = [line for line in DATA.splitlines() if line.startswith(f"| `{key}`")]
        assert re.findall(r"`([\w.]+)`", line)[1:] == list(columns)
    rows = {name for name in re.findall(r"^\| `([\w-]+)` \|", DATA, flags=re.MULTILINE)}
    assert {"model", "qa", "raw", *CHAT_TEMPLATES} <= rows
    assert {"auto", "gsm8k", "boxed", "text", "none"} <= rows
