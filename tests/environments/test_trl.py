"""Reward functions in TRL's signature; and the same classes with the same sampled text here and in TRL's trainer."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer

from rlhf.environments.contract import Environment
from rlhf.processes.attributes import EnvironmentView
from rlhf.rewards.trl_rewards import Judged, as_completion, has_trl_signature, judge

CLASSES = Path(__file__).parent / "trl_classes.py"
ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "a", "answer": 1}]


def judged(function: Callable[..., Any], rows: list[dict[str, Any]] = ROWS, **given: Any) -> Judged:
    arguments = {"prompts": ["a", "a"], "completions": ["b", "c"], "completion_ids": [[1], [2]], "rows": rows, **given}
    return asyncio.run(judge(function, **arguments))


# --- functions ---


def test_the_signature_tells_whose_a_function_is() -> None:
    class Judge:
        def __call__(self, completions: Any, **rest: Any) -> Any: ...

    trls = [
        lambda completions, **kwargs: 0, lambda environments, **kwargs: 0, Judge(), lambda log_metric, **kwargs: 0,
        functools.partial(lambda completions, bonus: 0, bonus=1), lambda prompts, completions, answer: 0,
    ]  # fmt: skip
    ours = [
        lambda response, **rest: 0,
        lambda response, answer, columns, metadata: 0,
        lambda *args, **kwargs: 0,
        str,
        max,
    ]
    assert [has_trl_signature(function) for function in trls] == [True] * len(trls)
    assert [has_trl_signature(function) for function in ours] == [False] * len(ours)


def test_a_function_gets_the_group_and_every_column() -> None:
    seen: dict[str, Any] = {}

    def function(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        kwargs["log_metric"]("m", 1)
        kwargs["log_metric"]("m", np.float32(2))
        kwargs["log_extra"]("e", ["x", "y"])
        return [0.0, 1.0]

    result = judged(function, environments=["E", "F"])
    assert result == Judged([0.0, 1.0], {"m": [1.0, 2.0]})
    of_trl = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
    assert seen.keys() == {"answer", *of_trl}
    assert (seen["prompts"], seen["completions"], seen["completion_ids"]) == (["a", "a"], ["b", "c"], [[1], [2]])
    assert (seen["answer"], seen["environments"], vars(seen["trainer_state"])) == ([1, 1], ["E", "F"], {})
    judged(function)
    assert judged(lambda completions, answer: answer).rewards == [1.0, 1.0]


def test_none_and_nan_say_that_others_judge_and_anything_but_numbers_is_refused() -> None:
    async def waiting(completions: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return [True, None]

    assert judged(waiting).rewards == [1.0, None]
    assert judged(lambda completions: np.array([np.nan, 2])).rewards == [None, 2.0]
    for returned, reason in [
        ([1.0], "1 scores, not 2"), (0.5, "float, not a list"), ({"a": 1, "b": 2}, "dict, not a list"),
        (["1", 2], "str, no finite number"), ([[1], 2], "list, no finite"), ([float("inf"), 1], "inf, no finite"),
        ("ab", "str, not a list"), (None, "NoneType, not a list"),
    ]:  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"returned {reason}"):
            judged(lambda completions, value=returned: value)


def test_completions_have_arguments_as_a_dictionary_and_no_ids() -> None:
    def calling(arguments: Any, **more: str) -> dict[str, Any]:
        function = {"name": "add", "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{**more, "type": "function", "function": function}]}

    answer = {"role": "tool", "name": "add", "content": "3"}
    said = {"role": "assistant", "content": "3"}
    turns = [calling('{"a": 1}', id="c1"), answer, {**said, "tool_calls": []}, calling("{", id="c2")]
    assert as_completion(turns) == [calling({"a": 1}), answer, said, calling("{")]


# --- beside TRL ---

Turn = str | list[tuple[str, Any]]  # text, or calls

SCRIPTS: dict[str, list[list[Turn]]] = {
    "GuessTheNumber": [
        [[("guess", {"number": 50})], [("guess", {"number": "x"})], [("guess", {})], "I give up."],
        [[("guess", {"number": n}) for n in range(1, 101)], [("guess", {"number": 1})], "Found it."],
    ],
    "Shop": [
        [[("buy", {"drink": "tea"}), ("look", {}), ("add", {"a": 1, "b": 2})], [("look", {})], "Done."],
        [[("buy", {"drink": "milk"}), ("buy", {"drink": "coffee", "count": 9}), ("_check", {}), ("reset", {})], "End."],
    ],
    "Slow": [
        [[("note", {"text": "abc"}), ("count", {}), ("note", {"text": ""}), ("no", {}), ("note", {"text": "b"})], "."],
        ["Nothing to note."],
    ],
}  # fmt: skip
FUNCTIONS = {"GuessTheNumber": [], "Shop": ["spent_in_budget", "calls_in_completions"], "Slow": []}


def written(turn: Turn) -> str:
    if isinstance(turn, str):
        return turn
    calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in turn]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def classes() -> Any:
    Environment(f"{CLASSES}:Shop")  # imports the file
    return sys.modules[str(CLASSES.resolve())]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_same_class_and_text_give_the_same_messages_and_rewards_in_trl(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed: make setup-bench")
    prompt = [{"role": "user", "content": "Go: "}]
    theirs = in_trl(name, prompt, tmp_path, monkeypatch)
    ours = here(name, prompt)
    assert ours["tools"] == theirs["tools"]
    assert ours["prompts"] == theirs["prompts"]
    assert ours["completions"] == theirs["completions"]
    rewards = [np.array(each["rewards"], np.float32) for each in (ours, theirs)]  # TRL keeps them in float32
    assert np.array_equal(*rewards, equal_nan=True)


def in_trl(name: str, prompt: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One batch of a real trainer whose model says what the script says."""
    import trl
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import get_json_schema

    for variable in ("TRL_EXPERIMENTAL_SILENCE", "WANDB_DISABLED"):
        monkeypatch.setenv(variable, "1")
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"}
    )
    tokenizer.pad_token = "<s>"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes))
    seen: dict[str, Any] = {}

    class Trainer(trl.GRPOTrainer):
        turns: int = 0

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            self.scripts = SCRIPTS[name] if not self.turns else [s for s in self.scripts if len(s) > self.turns]
            texts = [written(script[self.turns]) for script in self.scripts]
            self.turns += 1
            assert len(texts) == len(prompt_ids)
            return [tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"] for text in texts], None

        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
            rewards = super()._calculate_rewards(inputs, prompts, completions, ids)
            seen.update(prompts=prompts, completions=completions, rewards=rewards.tolist())
            return rewards

    module = classes()
    config = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=2, num_generations=2, max_steps=1, report_to=[],
        max_completion_length=20_000, use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    functions = [module.add] if name == "Shop" else []
    trainer = Trainer(
        model=model,
        reward_funcs=[getattr(module, function) for function in FUNCTIONS[name]],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt, "budget": 9}] * 2),
        processing_class=tokenizer,
        tools=functions,
        environment_factory=getattr(module, name),
    )
    random.seed(11)
    inputs = [{"prompt": prompt, "budget": 9}] * 2
    trainer._generate_and_score_completions(inputs)
    assert trainer.turns == max(map(len, SCRIPTS[name]))
    return seen | {"tools": [get_json_schema(tool) for tool in trainer.tools]}


def here(name: str, prompt: list[Any]) -> dict[str, Any]:
    """The same script through an episode, and the functions on views of what it left."""
    environment = Environment(f"{CLASSES}:{name}", tools=[f"{CLASSES}:add"] if name == "Shop" else [])
    row = {"prompt": prompt, "budget": 9}

    async def rollout(script: list[Turn], starts: Any) -> tuple[Any, list[Any], dict[str, Any]]:
        episode = environment.episode()
        random.setstate(starts)
        text = (await episode.reset(row))["text"] or ""
        after = random.getstate()
        turns: list[Any] = []
        for turn in script:
            message: dict[str, Any] = {"role": "assistant", "content": turn if isinstance(turn, str) else ""}
            turns.append(message)
            if not isinstance(turn, str):
                message["tool_calls"] = [
                    {"id": f"c{i}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
                    for i, (tool, arguments) in enumerate(turn)
                ]
                turns += (await episode.call(message["tool_calls"]))["answers"]
        finished = json.loads(json.dumps(await episode.finish()))
        random.setstate(after)
        return [{**prompt[-1], "content": prompt[-1]["content"] + text}], as_completion(turns), finished

    random.seed(11)
    rollouts = [asyncio.run(rollout(script, random.getstate())) for script in SCRIPTS[name]]
    prompts, completions, finished = ([rollout[i] for rollout in rollouts] for i in range(3))
    views = [EnvironmentView(each["attributes"]) for each in finished]
    columns = []
    for function in FUNCTIONS[name]:
        arguments = {"prompts": prompts, "completions": completions, "completion_ids": [[0], [0]]}
        columns.append(
            asyncio.run(
                judge(getattr(classes(), function), rows=[row, row], environments=views, **arguments)  # type: ignore[arg-type]
            ).rewards
        )
    if environment.has_reward:
        columns.append([each["reward"] for each in finished])
    rewards = [list(rewards) for rewards in zip(*columns, strict=True)]
    return {"tools": environment.tools, "prompts": prompts, "completions": completions, "rewards": rewards}
