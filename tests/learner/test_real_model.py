"""The canary on a pretrained model of 30 layers, where bfloat16 hides more than in the tiny ones: SmolLM2-135M.

The learner is the real one. Its engine is a second implementation that takes its weights: transformers' own forward,
one sequence at a time, with sdpa and whole logits. The last test has vLLM in its place.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from installed import seems_installed
from worlds import make_config, run_world

from rlhf.cluster.actors import ClusterError, record_call
from rlhf.sampling.requests import Completion
from rlhf.types import Prompt, World

pytestmark = [pytest.mark.stack, pytest.mark.real_model]

DIALOGUES = {
    "James writes a 3-page letter to 2 friends twice a week. How many pages does he write in a year?": "He writes each "
    "friend 3*2=6 pages a week, so he writes 6*2=12 pages every week. That means he writes 12*52=624 pages a year.",
    "What is the capital of France, and what is it known for?": "The capital of France is Paris. It is known for the "
    "Eiffel Tower, the Louvre, and its long history as a centre of art, fashion and philosophy.",
    "Write a Python function that returns the larger of two numbers.": "def larger(a, b):\n    if a > b:\n        "
    "return a\n    return b\n\nThe function compares both arguments and returns the one that is greater.",
    "Why is the sky blue?": "Sunlight is scattered by the molecules of the air. Blue light has a shorter wavelength "
    "than red light and is scattered more, so the sky looks blue from every direction.",
}
LAYERS = (0, 8, 15, 22, 29)
KINDS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip
EVERY_KIND = [f"model.layers.{LAYERS[i % len(LAYERS)]}.{kind}.weight" for i, kind in enumerate(KINDS)]
# In float32 the embedding is the head, too. Queries and keys, late in their run, move log-probs the least.
STALE = {
    "float32": ["model.embed_tokens.weight", "model.norm.weight", *EVERY_KIND],
    "bfloat16": [
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", *EVERY_KIND,
        *(f"model.layers.{layer}.self_attn.{kind}.weight" for layer in (3, 7, 11, 18, 22, 26, 28) for kind in
          ("q_proj", "k_proj")),
        *(f"model.layers.{layer}.{kind}.weight" for layer in (14, 28) for kind in
          ("input_layernorm", "post_attention_layernorm", "self_attn.v_proj")),
    ],
}  # fmt: skip
WRONG = {"temperature 0.9", "temperature 1.1", "shifted by one"}


def prompts_of(path: Path) -> list[Prompt]:
    """The questions; `ids` among their columns are the answer's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = []
    for question, answer in DIALOGUES.items():
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        columns = {"ids": tokenizer(answer)["input_ids"]}
        prompts.append(Prompt(question, 0, np.array(ids, np.int32), (), "", "", columns))
    return prompts


def untied(path: Path, target: Path) -> Path:
    """The same model with a head of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(path).save_pretrained(target)
    return target


class Pair:
    """A learner and the other implementation behind the calls that engines take; `stale` is what it never takes.

    What does not depend on `stale` is computed once: where a perturbation comes again and reaches other tensors, its
    numbers are known, and no weight is moved.
    """

    sleeps = False

    def __init__(self, learner: Any, path: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self.learner = learner
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).requires_grad_(False)
        self.params = dict(self.model.named_parameters())
        self.stale = self.wrong = ""
        self.run: tuple[int, ...] = ()
        self.known: dict[Any, Any] = {}
        self.seen: set[tuple[int, ...]] = set()  # perturbations, all of whose numbers are known
        self.is_known = False  # whether the present one is such
        self.learners, self.group = Calls(self.of_learner), Calls(self.of_engine)
        self.prompts = prompts_of(path)

    async def sleep_if_colocated(self) -> None:
        pass

    def of_learner(self, method: str, *arguments: Any) -> Any:
        if method == "canary":
            key = (self.run, *arguments[1:])
            if key not in self.known:
                self.known[key] = self.learner.canary(*arguments)
            return self.known[key]
        if method == "tensor_names":
            return self.learner.tensor_names()
        if method == "perturb_weights":
            self.run = arguments
            self.is_known = arguments in self.seen and self.stale not in self.learner.tensor_names()[slice(*arguments)]
        else:
            assert method == "restore_weights"
            self.seen.add(self.run)
            self.run = ()
        if not self.is_known:
            getattr(self.learner, method)(*arguments)
        self.is_known &= bool(self.run)
        return None

    async def send_weights(self, version: int) -> None:
        if self.is_known:
            return
        for name, tensor in self.learner:
            if name != self.stale:
                self.params[name].copy_(tensor)

    def of_engine(self, method: str, *arguments: Any) -> list[Any]:
        if method == "generate":
            beginning, settings, *_ = arguments
            (prompt,) = (each for each in self.prompts if np.array_equal(each.token_ids[: len(beginning)], beginning))
            ids = np.array(prompt.columns["ids"], np.int32)[: settings.max_tokens]
            return [Completion(ids, np.zeros(len(ids)), "stop", ())]
        (sequences,) = arguments
        names = self.learner.tensor_names()
        key = (self.run, self.wrong, bool(self.run) and self.stale in names[slice(*self.run)])
        if key[2]:
            return [self.score(ids) for ids in sequences]
        if key not in self.known:
            self.known[key] = [self.score(ids) for ids in sequences]
        return self.known[key]

    def score(self, ids: np.ndarray) -> np.ndarray:
        tokens = torch.from_numpy(ids).long()
        logits = self.model(tokens[None]).logits[0, :-1].float()
        if self.wrong.startswith("temperature"):
            logits /= float(self.wrong.split()[1])
        logprobs = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0].numpy()
        return np.concatenate([[0.0], np.roll(logprobs, self.wrong == "shifted by one")])


class Calls:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def call(self, ask: Callable[[Any], Any]) -> list[Any]:
        return [self.answer(*record_call(ask))]

    async def call_one(self, _: int, ask: Callable[[Any], Any], **__: Any) -> Any:
        return self.answer(*record_call(ask))


def refusals(world: World, path: Path, dtype: str, stale_tensors: list[str]) -> dict[str, str]:
    """What the canary says of each case; "" where it is content."""
    from rlhf.cluster.canary import Canary
    from rlhf.learner.policy import Learner

    config = make_config(path, model={"dtype": dtype}, learner={"zero_stage": 1})
    pair: Any = Pair(Learner(config, world), path, dtype)
    # In float32 an old tensor moves log-probs by hundreds of tolerances: one sequence is enough, and four times faster.
    canary = Canary(pair, prompts_of(path)[: 1 if dtype == "float32" else None], dtype=dtype, max_tokens=256)

    async def judge(stale: str, wrong: str) -> str:
        pair.stale, pair.wrong = stale, wrong
        try:
            await canary.measure_noise()
            await canary.check_start(0)
        except ClusterError as error:
            pair.stale = ""
            await pair.send_weights(0)
            return str(error)
        return ""

    async def judge_all() -> dict[str, str]:
        messages = {"": await judge("", "")}
        messages |= {wrong: await judge("", wrong) for wrong in sorted(WRONG)}
        return messages | {stale: await judge(stale, "") for stale in stale_tensors}

    return asyncio.run(judge_all())


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        ("bfloat16", 4),
        pytest.param("bfloat16", 32, marks=pytest.mark.faults),
        pytest.param("float32", 11, marks=pytest.mark.faults),
    ],
)
def test_one_old_tensor_a_wrong_temperature_and_a_shift_are_refused_and_a_correct_engine_is_not(
    real_model_dir: Path, tmp_path: Path, dtype: str, count: int
) -> None:
    path = real_model_dir if dtype == "float32" else untied(real_model_dir, tmp_path / "untied")
    (messages,) = run_world(refusals, 1, path, dtype, STALE[dtype][:count])
    assert messages.pop("") == ""
    for wrong in WRONG:
        assert "disagree on the untouched weights" in messages.pop(wrong), wrong
    assert len(messages) == count
    for stale, message in messages.items():
        assert "does not hold the perturbed weights" in message, stale


# vLLM loads it in each of its processes: the tensor that a file names stays at its first value.
STALE_RECEIVER = """\
import os, pathlib
first = {}
def install():
    from rlhf.weights.host_copy import HostCopy
    tensors = HostCopy.tensors
    def all_but_one(self, names):
        stale = pathlib.Path(os.environ["STALE_TENSOR"]).read_text()
        for name, tensor in tensors(self, names):
            first.setdefault(name, tensor.clone())
            yield name, first[name] if name == stale else tensor
    HostCopy.tensors = all_but_one
"""


async def refused_by_vllm(config: Any, prompts: list[Prompt], file: Path, stale: str) -> dict[str, str]:
    """What the canary says of an engine of vLLM that keeps no tensor, or this one; "" where it is content."""
    from rlhf.cluster.canary import Canary
    from rlhf.cluster.engines import started_engines

    messages = {}
    async with started_engines(config) as engines:
        canary = Canary(engines, prompts, dtype=config.model.dtype, max_tokens=config.max_sequence_tokens)
        await canary.measure_noise()
        for name in ("", stale):
            file.write_text("")
            await engines.send_weights(0)
            file.write_text(name)
            try:
                await canary.check_start(0)
                messages[name] = ""
            except ClusterError as error:
                messages[name] = str(error)
    return messages


@pytest.mark.faults
@pytest.mark.parametrize("stale", ["model.layers.3.self_attn.q_proj", "model.layers.0.input_layernorm"])
def test_an_engine_of_vllm_that_keeps_one_tensor_is_refused_and_one_that_follows_is_not(
    real_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: str
) -> None:
    seems_installed(tmp_path, "stale", "1", plugin="stale = stale_receiver:install")
    (tmp_path / "stale_receiver.py").write_text(STALE_RECEIVER)
    monkeypatch.setenv("STALE_TENSOR", str(tmp_path / "stale"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    config = make_config(real_model_dir, model={"dtype": "bfloat16"}, rollout={"max_response_tokens": 64})
    name = f"{stale}.weight"
    messages = asyncio.run(refused_by_vllm(config, prompts_of(real_model_dir), tmp_path / "stale", name))
    assert messages[""] == ""
    assert "does not hold the perturbed weights" in messages[name]
