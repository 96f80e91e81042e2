"""The `data` section: what may be written for a data set, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from rlhf.config.data import DataConfig, SourceConfig


def parse(**section: Any) -> DataConfig:
    return DataConfig.model_validate_json(json.dumps(section))


def test_a_string_a_mapping_and_a_list_of_either_name_the_same_data() -> None:
    expected = (SourceConfig(path="openai/gsm8k"),)
    assert parse(train="openai/gsm8k").train == expected
    assert parse(train={"path": "openai/gsm8k"}).train == expected
    assert parse(train=["openai/gsm8k"]).train == expected
    assert parse(train=[{"path": "openai/gsm8k"}]).train == expected


def test_a_resolved_section_reads_back_as_the_same_config() -> None:
    config = parse(train=["a/train.jsonl", {"path": "b/c", "rows": 3}], eval="b/test.parquet", prompt_column="text")
    assert DataConfig.model_validate_json(config.model_dump_json()) == config


def test_a_template_is_a_name_or_a_file_and_another_word_is_refused_with_the_names() -> None:
    assert parse(train="a.jsonl", template="my/chat.jinja").template == "my/chat.jinja"
    assert parse(train="a.jsonl", chat_template_kwargs={"enable_thinking": False}).chat_template_kwargs == {
        "enable_thinking": False
    }
    with pytest.raises(ValueError, match=r"'chat' is no template\. Use model, chatml, .*ends with \.jinja"):
        parse(train="a.jsonl", template="chat")


@pytest.mark.parametrize("nothing", [None, []])
def test_evaluation_data_is_optional_and_training_data_is_not(nothing: Any) -> None:
    assert parse(train="a.jsonl", eval=nothing).eval == ()
    with pytest.raises(ValueError, match=r"data\.train is empty"):
        parse(train=nothing)


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("Qwen/data-2.5", "data-2.5"),
        ("../x/train.jsonl", "train"),
        ("folder/math", "math"),
        ("set.parquet", "set"),
    ],
)
def test_the_label_is_the_stem_of_a_file_or_the_last_part_of_a_name(path: str, label: str) -> None:
    assert SourceConfig(path=path).label == label
    assert SourceConfig(path=path, source="mine").label == "mine"


@pytest.mark.slow
def test_the_schema_and_the_data_modules_import_without_the_libraries_that_they_use_later() -> None:
    program = (
        "import sys, rlhf.config.data, rlhf.data.load, rlhf.data.order\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
