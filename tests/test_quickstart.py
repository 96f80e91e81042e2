"""The quickstart's tokenizer, problems, careless pupil, files and warm-up."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from worlds import run_world

from rlhf import quickstart
from rlhf.config.cli import run_program
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.parsers import tool_parser_of
from rlhf.config.ppo import PPOConfig
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.config.supervised import SFTConfig
from rlhf.learner import tiny_model
from rlhf.quickstart import Problem
from rlhf.types import World

CONFIGS = Path(__file__).parent.parent / "configs"
SFT_TOKENS = 64  # data.max_tokens of configs/sft_quickstart.yaml
TINY = {"hidden_size": 32, "num_layers": 1, "num_heads": 1}

GSM8K_ROW = (
    "Natalia\u2019s friends sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether: $1,000.50 \u2014 50%\t\n\n#### 72"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quickstart") / "made"
    quickstart.write_quickstart(output, seed=3, warmup_steps=0, train_rows=300, test_rows=100, model_options=TINY)
    return output


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "text",
    [
        GSM8K_ROW,
        "\U0001f469\u200d\U0001f680 na\u00efve \u6570\u5b66 \u0000\u0007 \ufffd",
        "  two spaces , don't  join .\r\n\\frac{1}{2} \\boxed{12}",
        "",
    ],
)
def test_any_text_comes_back_from_the_tokenizer_unchanged(text: str) -> None:
    tokenizer = tiny_model.make_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decomposed_letters_come_back_composed_as_in_every_qwen_tokenizer() -> None:
    tokenizer = tiny_model.make_tokenizer()
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == unicodedata.normalize("NFC", "e\u0301") == "\u00e9"


def test_a_box_is_one_token_that_survives_skipping_the_special_ones() -> None:
    tokenizer = tiny_model.make_tokenizer()
    token_ids = tokenizer.encode("\\boxed{7}<|end|>")
    assert len(token_ids) == 4
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "\\boxed{7}"


def test_chat_template_names_the_roles_and_opens_the_assistants_turn() -> None:
    tokenizer = tiny_model.make_tokenizer()
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Sure?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Add.<|end|><|user|>What is 1 + 2?<|end|><|assistant|>3<|end|><|user|>Sure?<|end|><|assistant|>"
    )


def test_saved_folder_loads_with_the_auto_classes_and_agrees_with_the_original(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expected = tiny_model.make_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert tokenizer.get_vocab() == expected.get_vocab()
    assert tokenizer.encode(GSM8K_ROW) == expected.encode(GSM8K_ROW)
    assert tokenizer.chat_template == expected.chat_template
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings >= 2048
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    same = tiny_model.make_model(**TINY, seed=3)
    assert all(
        torch.equal(loaded, kept)
        for loaded, kept in zip(model.state_dict().values(), same.state_dict().values(), strict=True)
    )


def test_careful_work_shows_every_column_sum_and_boxes_the_answer() -> None:
    assert Problem(347, 285).worked() == "12 13 06 \\boxed{632}"
    assert Problem(999, 999).worked() == "18 19 19 \\boxed{1998}"
    assert Problem(100, 200).worked() == "00 00 03 \\boxed{300}"


def test_careful_work_always_boxes_the_answer_of_the_file() -> None:
    for problem in quickstart.make_problems(500, seed=1):
        assert problem.worked().endswith(f" \\boxed{{{problem.answer}}}")
        assert problem.answer == str(problem.left + problem.right)


def test_careless_pupil_is_right_for_about_a_third_and_mostly_forgets_to_carry() -> None:
    rng = random.Random(0)
    problems = quickstart.make_problems(4000, seed=2)
    right = sum(problem.worked(rng) == problem.worked() for problem in problems)
    assert 0.27 < right / len(problems) < 0.35
    one_carry = Problem(115, 125)
    answers = [one_carry.worked(rng) for _ in range(1000)]
    assert max(set(answers), key=answers.count) == "10 03 02 \\boxed{230}"


def test_train_and_test_share_no_sum_in_either_order(folder: Path) -> None:
    def sums(rows: list[dict[str, str]]) -> set[frozenset[str]]:
        return {frozenset(row["question"].removeprefix("What is ").rstrip("?").split(" + ")) for row in rows}

    train, test = read_rows(folder / "train.jsonl"), read_rows(folder / "test.jsonl")
    assert (len(train), len(test)) == (300, 100)
    assert len(sums(train)) == 300
    assert len(sums(test)) == 100
    assert not sums(train) & sums(test)


def test_rows_hold_the_question_and_its_right_answer(folder: Path) -> None:
    for row in read_rows(folder / "test.jsonl"):
        left, right = row["question"].removeprefix("What is ").rstrip("?").split(" + ")
        assert row["answer"] == str(int(left) + int(right))


def test_a_pair_prefers_right_work_to_wrong_work_that_is_mostly_as_a_pupil_writes_it(folder: Path) -> None:
    pairs = {name: read_rows(folder / f"pairs_{name}.jsonl") for name in ("train", "test")}
    for name, rows in pairs.items():
        problems = read_rows(folder / f"{name}.jsonl")
        assert [row["prompt"] for row in rows] == [problem["question"] for problem in problems]
        for row, problem in zip(rows, problems, strict=True):
            assert row["chosen"].endswith(f"\\boxed{{{problem['answer']}}}")
            assert not row["rejected"].endswith(f"\\boxed{{{problem['answer']}}}")
    rejected = [row["rejected"] for row in pairs["train"]]
    whole = [work for work in rejected if work.endswith("}")]
    assert 0.03 < 1 - len(whole) / len(rejected) < 0.15  # a third of the quarter that no pupil would write is cut off


def test_the_configs_of_ppo_and_the_reward_model_read_what_the_quickstart_and_each_other_write(folder: Path) -> None:
    def in_folder(path: str) -> Path:
        return folder / path.removeprefix("runs/quickstart-data/")

    reward = load_config(RewardTrainingConfig, [str(CONFIGS / "reward_model_quickstart.yaml")])
    assert all(in_folder(source.path).is_file() for source in (*reward.data.train, *reward.data.eval))
    for name in ("ppo_quickstart.yaml", "ppo_reward_model_quickstart.yaml"):
        config = load_config(PPOConfig, [str(CONFIGS / name)])
        assert (in_folder(config.model.path) / "config.json").is_file()
        assert all(in_folder(source.path).is_file() for source in (*config.data.train, *config.data.eval))
        assert not list(config.warnings())
    assert config.reward_model is not None
    assert config.reward_model.path == config.critic.path == f"{reward.run.dir}/model"


def test_wrong_work_is_never_right() -> None:
    rng = random.Random(0)
    problem, other = Problem(347, 285), Problem(100, 200)
    wrong = {quickstart.wrong_work(problem, [other], rng) for _ in range(1000)}
    assert problem.worked() not in wrong
    assert wrong > {other.worked(), "12 13 06 \\boxed{638}", "12 1"}
    assert "12 12 05 \\boxed{522}" in wrong  # both carries forgotten
    assert problem.worked() not in {quickstart.wrong_work(problem, [problem], rng) for _ in range(100)}


def warmed_up(_: World, folder: Path, seed: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        quickstart.write_quickstart(
            folder, seed=seed, warmup_steps=25, train_rows=300, test_rows=10, model_options={**TINY, "hidden_size": 64}
        )
    return printed.getvalue()


@pytest.mark.stack
def test_same_seed_makes_the_same_files_and_another_seed_others_and_the_warm_up_lowers_the_loss(
    tmp_path: Path,
) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        (printed,) = run_world(warmed_up, 1, tmp_path / name, seed)
    for file in ("train.jsonl", "test.jsonl", "pairs_train.jsonl", "demonstrations.jsonl", "model/model.safetensors"):
        first, again, other = ((tmp_path / name / file).read_bytes() for name in ("a", "b", "c"))
        assert first == again
        assert first != other
    losses = {int(step): float(loss) for step, loss in re.findall(r"warm-up step (\d+)/25  loss ([\d.]+)", printed)}
    assert losses[25] < 0.6 * losses[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]  # nothing partial is left


def test_a_demonstration_is_what_the_careless_pupil_says_to_a_question() -> None:
    problems = quickstart.make_problems(20, seed=0)
    rows = quickstart.make_demonstrations(problems, 4000, seed=0)
    answers = {problem.question: problem.answer for problem in problems}
    talks = [[message["role"] for message in row["messages"]] for row in rows]
    assert talks == [["user", "assistant"]] * 4000
    said = [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows]
    assert len({question for question, _ in said}) == 20
    assert 0.2 < sum(work.endswith(f"\\boxed{{{answers[question]}}}") for question, work in said) / 4000 < 0.5


# --- the task with tools ---


def demonstrated_call(problem: Problem) -> list[dict[str, Any]]:
    """The first demonstration that asks the calculator."""
    rows = quickstart.make_tool_demonstrations([problem], 100, seed=0)
    return next(row["messages"] for row in rows if len(row["messages"]) == 4)


def test_a_call_has_the_form_of_hermes_and_costs_its_expression_and_two_tokens() -> None:
    tokenizer = tiny_model.make_tokenizer(tools=True)
    talk = demonstrated_call(Problem(347, 285, "*"))
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
    text = tokenizer.apply_chat_template(talk, tools=tools, tokenize=False)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "347 * 285"}}\n</tool_call>'
    assert text == (
        f"<|tools|>calculator<|end|><|user|>What is 347 * 285?<|end|><|assistant|>{call}<|end|><|tool|>98895<|end|>"
        "<|assistant|>\\boxed{98895}<|end|>"
    )
    assert len(tokenizer.encode(call)) == len("347 * 285") + 2
    assert tool_parser_of(tokenizer.chat_template, "auto") == "hermes"
    config = load_config(GRPOConfig, [str(CONFIGS / "tools_quickstart.yaml")])
    longest = demonstrated_call(Problem(999, 998, "*"))
    ids = tokenizer.encode(tokenizer.apply_chat_template(longest, tools=tools, tokenize=False))
    assert len(ids) <= SFT_TOKENS
    assert len(tokenizer.encode(call)) + 1 <= config.rollout.max_response_tokens


def test_without_tools_the_template_writes_what_that_of_the_sums_does() -> None:
    talk = [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "3"}]
    texts = [
        tiny_model.make_tokenizer(tools=tools).apply_chat_template(talk, tokenize=False) for tools in (True, False)
    ]
    assert texts[0] == texts[1]


def test_a_share_of_the_demonstrations_asks_the_calculator_and_the_others_copy_the_question() -> None:
    problems = quickstart.make_problems(50, 0, "*")
    rows = quickstart.make_tool_demonstrations(problems, 4000, seed=0)
    answers = {problem.question: problem.answer for problem in problems}
    for row in rows:
        first, *_, last = row["messages"]
        digits = "".join(filter(str.isdigit, first["content"]))
        written = {2: digits, 4: answers[first["content"]]}[len(row["messages"])]  # by number of messages
        assert last["content"] == f"\\boxed{{{written}}}"
        assert answers[first["content"]] != digits
    calls = sum(len(row["messages"]) == 4 for row in rows)
    share = calls / len(rows)
    assert share == pytest.approx(quickstart.CALL_FRACTION, abs=0.02)


def test_the_files_of_the_task_with_tools_fit_its_config(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    output = tmp_path / "made"
    quickstart.write_quickstart(output, warmup_steps=0, train_rows=300, test_rows=100, model_options=TINY, tools=True)
    assert sorted(path.name for path in output.iterdir()) == ["model", "test.jsonl", "train.jsonl"]
    for row in read_rows(output / "test.jsonl"):
        left, right = row["question"].removeprefix("What is ").rstrip("?").split(" * ")
        assert row["answer"] == str(int(left) * int(right))
        assert len(row["answer"]) == 6
    model = AutoTokenizer.from_pretrained(output / "model")
    assert model.get_vocab() == tiny_model.make_tokenizer(tools=True).get_vocab()
    config = load_config(GRPOConfig, [str(CONFIGS / "tools_quickstart.yaml")])
    assert not list(config.warnings())


def test_the_warm_up_is_that_of_the_config() -> None:
    config = load_config(SFTConfig, [str(CONFIGS / "sft_quickstart.yaml")], ["run.dir=runs/quickstart-data/run"])
    assert quickstart.warmup_config(Path("runs/quickstart-data"), seed=0) == config
    steps = quickstart.WARMUP_STEPS["sums"]
    trained = config.with_steps(steps * config.learner.sequences_per_update)
    assert (trained.steps, trained.training.warmup_updates) == (steps, 47)


def test_a_folder_that_holds_files_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    assert run_program(lambda: quickstart.main(["--output", str(tmp_path)])) == 2
    message = capsys.readouterr().err
    assert f"--output={tmp_path}" in message
    assert "new folder" in message
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_arguments_the_files_lie_where_the_config_looks_and_the_next_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(quickstart, "write_quickstart", lambda folder, **_: made.append(folder))
    for arguments in ([], ["--task", "tools"], ["--output", "my data"]):
        quickstart.main(arguments)
    assert made == [Path("runs/quickstart-data"), Path("runs/tools-quickstart-data"), Path("my data")]
    for folder, name in zip(made, ("quickstart", "tools_quickstart"), strict=False):
        config = load_config(GRPOConfig, [str(CONFIGS / f"{name}.yaml")])
        assert (config.model.path, config.data.train[0].path) == (f"{folder}/model", f"{folder}/train.jsonl")
    sums, tools, elsewhere = (line for line in capsys.readouterr().out.splitlines() if line.startswith("next: "))
    assert sums.endswith("rlhf.grpo --config configs/quickstart.yaml")
    assert tools.endswith("rlhf.grpo --config configs/tools_quickstart.yaml")
    assert elsewhere.endswith(
        "quickstart.yaml 'model.path=my data/model' 'data.train=my data/train.jsonl' 'data.eval=my data/test.jsonl'"
    )


def test_negative_warm_up_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        quickstart.write_quickstart(tmp_path / "out", warmup_steps=-1)


@pytest.mark.slow
def test_help_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom rlhf import quickstart\n"
        "try:\n    quickstart.main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'ray', 'vllm', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
