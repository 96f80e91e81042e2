"""A model that is fed the policy's ids reads the same words at them, whatever its tokenizer's files look like."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import make_config, make_ppo_config

from rlhf.check.examination import stored_vocabulary
from rlhf.check.start_checks import plan_problems, start_problems
from rlhf.config.grpo import GRPOConfig
from rlhf.data.model_files import load_tokenizer
from rlhf.data.vocabulary import check_vocabularies, check_vocabulary

Change = Callable[[dict[str, Any]], Any]


def swapped(stored: dict[str, Any]) -> None:
    """The same texts, two of them at each other's ids."""
    vocabulary = stored["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]


def reordered(stored: dict[str, Any]) -> None:
    one, other = stored["added_tokens"][:2]
    one["content"], other["content"] = other["content"], one["content"]


def larger(stored: dict[str, Any]) -> None:
    last = max(*stored["model"]["vocab"].values(), *(token["id"] for token in stored["added_tokens"]))
    stored["added_tokens"].append(stored["added_tokens"][0] | {"id": last + 1, "content": "<more>"})


def same_words(stored: dict[str, Any]) -> None:
    """Other special tokens, another normalizer: the ids are the same words."""
    stored["normalizer"] = {"type": "NFC"}
    stored["added_tokens"][0]["special"] = False


def other_model(tiny_model_dir: Path, folder: Path, change: Change) -> Path:
    """A copy of the policy with another tokenizer.json."""
    other = shutil.copytree(tiny_model_dir / "model", folder / "other")
    file = other / "tokenizer.json"
    stored = json.loads(file.read_text())
    change(stored)
    file.write_text(json.dumps(stored))
    settings = other / "tokenizer_config.json"
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if "added" not in k}))
    return other


def fed(model: Path, other: Path, run: Path, role: str) -> GRPOConfig:
    if role == "critic":
        return make_ppo_config(model, run={"dir": str(run)}, critic={"path": str(other)})
    teacher = {"path": str(other)}
    return make_config(model, run={"dir": str(run)}, algo={"teacher": teacher})


@pytest.mark.parametrize("role", ["critic", "algo.teacher"])
@pytest.mark.parametrize(("change", "token"), [(swapped, "is 'B' there and 'A' in model.path"), (reordered, "token 2")])
def test_another_word_at_an_id_is_refused_before_anything_starts_with_both_texts(
    tiny_model_dir: Path, tmp_path: Path, role: str, change: Change, token: str
) -> None:
    other = other_model(tiny_model_dir, tmp_path, change)
    config = fed(tiny_model_dir / "model", other, tmp_path / "run", role)
    with pytest.raises(ValueError, match=rf"^{role}\.path={other}: different vocabulary: token ") as refusal:
        list(check_vocabularies(config, load_tokenizer(config.model)))
    assert token in str(refusal.value)
    assert [each for each in plan_problems(config) if "vocabulary" in each] == [str(refusal.value)]


@pytest.mark.parametrize("change", [larger, same_words])
def test_further_words_and_other_special_tokens_are_accepted(
    tiny_model_dir: Path, tmp_path: Path, change: Change
) -> None:
    other = other_model(tiny_model_dir, tmp_path, change)
    config = fed(tiny_model_dir / "model", other, tmp_path / "run", "critic")
    assert list(check_vocabularies(config, load_tokenizer(config.model))) == []
    assert not [each for each in plan_problems(config) if "vocabulary" in each]


@pytest.mark.parametrize("settings", [{}, {"added_tokens_decoder": {}}])
@pytest.mark.parametrize("change", [swapped, larger, same_words])
def test_the_stored_vocabulary_is_the_one_that_transformers_loads(
    tiny_model_dir: Path, tmp_path: Path, change: Change, settings: dict[str, Any]
) -> None:
    other = other_model(tiny_model_dir, tmp_path, change)
    file = other / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    model = make_config(other).model
    loaded = load_tokenizer(model).get_vocab()
    assert ("<more>" in loaded) == (change is larger and not settings)  # transformers drops it
    assert stored_vocabulary(model, "critic.path") == {number: token for token, number in loaded.items()}


def test_a_word_that_is_not_there_at_all_is_named() -> None:
    check_vocabulary({0: "a"}, {0: "a", 1: "b"}, "x")
    with pytest.raises(ValueError, match=r"token 1 is nothing there and 'b' in model\.path"):
        check_vocabulary({0: "a", 1: "b"}, {0: "a"}, "x")


def test_without_a_tokenizer_only_the_size_is_compared_and_a_warning_says_so(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = tiny_model_dir / "model"
    other = shutil.copytree(model, tmp_path / "other", ignore=shutil.ignore_patterns("tokenizer*", "chat*"))
    config = fed(model, other, tmp_path / "run", "critic")
    assert not [each for each in start_problems(config) if "vocabulary" in each]
    (warning,) = check_vocabularies(config, load_tokenizer(config.model))
    assert warning.startswith(f"critic.path={other}: the model has no tokenizer")


def test_a_tokenizer_in_another_form_is_loaded_and_compared(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = tiny_model_dir / "model"
    other = shutil.copytree(model, tmp_path / "other")
    (other / "tokenizer.json").unlink()
    config = fed(model, other, tmp_path / "run", "critic")
    vocabulary = load_tokenizer(config.model).get_vocab()
    (other / "merges.txt").write_text("#version: 0.2\n")
    for changed in (False, True):
        if changed:
            vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
        (other / "vocab.json").write_text(json.dumps(vocabulary))
        if changed:
            with pytest.raises(ValueError, match=r"critic\.path=.* is 'B' there and 'A' in model\.path"):
                list(check_vocabularies(config, load_tokenizer(config.model)))
        else:
            assert list(check_vocabularies(config, load_tokenizer(config.model))) == []


def test_a_reward_model_without_a_tokenizer_is_refused_since_it_reads_texts(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = tiny_model_dir / "model"
    other = shutil.copytree(model, tmp_path / "other", ignore=shutil.ignore_patterns("tokenizer*", "chat*"))
    config = make_config(model, run={"dir": str(tmp_path / "run")}, reward_model={"path": str(other)})
    assert f"reward_model.path={other}: the model has no tokenizer" in "\n".join(start_problems(config))
