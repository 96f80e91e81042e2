"""What --plan says of learners that share each sequence: bytes, memory, and how many should."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import make_config, run_world

from rlhf.check import layouts, memory, speed, verdict
from rlhf.check.model_shape import shape_at
from rlhf.config.grpo import GRPOConfig
from rlhf.types import World

LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
TINY: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 24, "vocab_size": 120, "tie_word_embeddings": True,
}  # fmt: skip
# Keys of 16 + 8 numbers, values of 12, and as many heads of both as of queries.
LATENT: dict[str, Any] = TINY | {
    "model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4, "first_k_dense_replace": 3,
}  # fmt: skip
MIXES = {"layer_types": ["conv", "full_attention", "conv"]}
TOKENS = 96


@pytest.fixture
def long(tmp_path: Path) -> Callable[..., GRPOConfig]:
    """A config of Llama 3.1 8B on 8 GPUs of one node, four of them learners, with sequences of `tokens`."""

    def make(tokens: int = 65536, **sections: dict[str, Any]) -> GRPOConfig:
        base: dict[str, dict[str, Any]] = {
            "model": {"path": LLAMA_8B, "dtype": "bfloat16"},
            "data": {"max_prompt_tokens": 4096},
            "rollout": {"max_response_tokens": tokens - 4096},
            "learner": {"max_tokens_per_microbatch": tokens},
            "cluster": {"device": "cuda", "learners": 4, "engines": 4, "gpu": "H100"},
        }
        names = {**base, **sections}
        return make_config(tmp_path, **{name: {**base.get(name, {}), **sections.get(name, {})} for name in names})

    return make


def test_a_learner_that_shares_sequences_of_64k_tokens_holds_a_part_and_the_exchanges(
    long: Callable[..., GRPOConfig],
) -> None:
    shape = shape_at(LLAMA_8B)
    assert shape is not None
    model, cluster = {"gradient_checkpointing": True}, {"learners": 8, "sequence_parallel": 8}
    shared = long(model=model, cluster=cluster, learner={"max_tokens_per_microbatch": 8192, "zero_stage": 3})
    alone = long(model=model, cluster={"learners": 8}, learner={"zero_stage": 3})
    assert shared.row_tokens == alone.row_tokens == 65536
    assert shared.cluster.data_shards == 1
    parts, whole = (
        {part.name: part.size for part in memory.learner_memory(shape, config)} for config in (shared, alone)
    )
    assert parts["activations, checkpointed"] == whole["activations, checkpointed"] / 8
    # a token: the output once more (32 heads of 128), and q, k, v twice (32 + 8 + 8), 2 bytes each
    assert parts["exchanges around attention"] == 8192 * 2 * 128 * (32 + 2 * 48)
    # of one row in an update, and of all 16 rollouts of the step, since the 8 learners are one data shard
    assert parts["columns of whole rows"] == 65536 * (memory.ROW_COLUMNS + 16 * memory.KEPT_COLUMNS)
    assert "exchanges around attention" not in whole
    assert whole["columns of whole rows"] == 65536 * (memory.ROW_COLUMNS + 16 // 8 * memory.KEPT_COLUMNS)


def test_what_a_learner_keeps_of_a_row_of_its_own_is_not_more_than_is_counted() -> None:
    import torch

    from rlhf.algo.packing import pack
    from rlhf.learner.policy_model import DeviceTokens

    prompt, responses = np.arange(400, dtype=np.int32), np.arange(2000, dtype=np.int32).reshape(4, 500)
    row = pack([np.concatenate([prompt, response]) for response in responses])
    tokens = DeviceTokens.of(row, torch.device("cpu"))
    held = [x for x in (*vars(tokens).values(), *vars(tokens.segments).values()) if isinstance(x, torch.Tensor)]
    size = sum({x.data_ptr(): x.nbytes for x in held}.values())
    # ids, positions, the index of the computed token and of those alone, log-probs, one mask; lengths and bounds
    assert size == 3600 * (8 + 8 + 8 + 4 + 1) + 2400 * 8 + 4 * 8 + 2 * 5 * 4
    assert size < 3600 * memory.KEPT_COLUMNS


def test_fewer_key_heads_than_learners_are_kept_and_sent_more_than_once(long: Callable[..., GRPOConfig]) -> None:
    shape = dataclasses.replace(shape_at(LLAMA_8B), kv_heads=2)  # type: ignore[type-var]
    config = long(cluster={"learners": 8, "sequence_parallel": 8})
    (exchanges,) = (p for p in memory.learner_memory(shape, config) if p.name == "exchanges around attention")
    kept, moved = 32 * 2 * 128 * (32 + 2 * 6), 2 * 2 * 128 * (32 + 2 * 8)  # without checkpointing in all 32 layers
    assert exchanges.size == 65536 * (kept + moved)
    assert speed.exchanged_bytes(shape, config) == 2 * 32 * 2 * 128 * (2 * 32 + 2 * 8) * 7 / 8


@pytest.mark.parametrize(("tokens", "shared"), [(65536, 1), (131072, 2), (262144, 4)])
def test_the_plan_lets_learners_share_sequences_where_nothing_else_fits(
    tokens: int, shared: int, long: Callable[..., GRPOConfig]
) -> None:
    config, shape = long(tokens), shape_at(LLAMA_8B)
    assert shape is not None
    best = layouts.search_layouts(config, shape, 8).best(0)
    assert best is not None
    assert best.config.cluster.sequence_parallel == shared
    assert best.config.row_tokens >= tokens
    assert layouts.first_problem(best.config, shape) is None


def test_learners_are_asked_to_share_only_what_the_run_lets_them(
    long: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    def wider(tokens: int = 65536, **sections: dict[str, Any]) -> set[int]:
        return {shared for _, shared in layouts.smaller_budgets(long(tokens, **sections), 8)}

    for name, changes in (("odd", {"num_attention_heads": 12}), ("mixes", MIXES)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(TINY | changes))
    assert wider() == {2, 4, 8}
    assert wider(model={"path": str(tmp_path / "odd")}) == {2, 4}
    assert wider(algo={"teacher": {"path": str(tmp_path / "odd")}}) == {2, 4}
    assert wider(model={"path": str(tmp_path / "mixes")}) == set()
    assert wider(model={"path": "microsoft/Phi-4-mini-instruct"}) == set()  # longrope
    assert wider(4097 + 4096) == {2, 4, 8}


def test_a_layout_that_does_not_fit_says_what_is_missing_not_that_learners_are_of_another_number(
    long: Callable[..., GRPOConfig],
) -> None:
    shape = shape_at(LLAMA_8B)
    assert shape is not None
    reason = layouts.search_layouts(long(786432), shape, 8).layouts["separate"]  # 8 learners would do
    assert isinstance(reason, str)
    assert reason.startswith("a learner needs ")


def test_a_refusal_says_whether_more_learners_per_sequence_were_tried(long: Callable[..., GRPOConfig]) -> None:
    shape, searched = shape_at(LLAMA_8B), [layouts.Search(8, {"separate": "no"})]
    assert shape is not None
    for given, tried in ((2, "smaller microbatches, more learners per sequence. "), (8, "smaller microbatches. ")):
        cluster = {"learners": 8, "sequence_parallel": given, "gpu_memory_gib": 1}
        config = long(model={"lora": {"rank": 8}}, cluster=cluster)
        estimates = memory.memory_of_roles(config, shape)
        refusal = verdict.fit_verdict(config, shape, estimates, lambda _: None, searched).text
        assert f" Also tried: up to 8 GPUs, {tried}" in refusal


def test_a_budget_that_is_too_small_names_the_number_of_learners_that_would_do(
    long: Callable[..., GRPOConfig],
) -> None:
    with pytest.raises(ValueError, match=r"let 4 learners share each \(cluster\.sequence_parallel=4\)"):
        long(learner={"max_tokens_per_microbatch": 16384})
    with pytest.raises(ValueError, match=r"has to fit\. Raise the budget, or shorten the sequences\."):
        long(learner={"max_tokens_per_microbatch": 16383})
    with pytest.raises(ValueError, match=r"cluster\.sequence_parallel=3: it does not divide cluster\.learners=4"):
        long(cluster={"sequence_parallel": 3})


def sent_bytes(world: World, folder: Path) -> int:
    """What this rank sends to others in a forward and backward pass with full checkpointing, as counted."""
    import torch
    from deepspeed import comm

    from rlhf.algo.packing import pack
    from rlhf.config.sections import ModelConfig
    from rlhf.learner.deepspeed_settings import join_world
    from rlhf.learner.policy_model import DeviceTokens, load_policy
    from rlhf.learner.sequence_parallel import SequenceGroup

    world = dataclasses.replace(world, sequence_parallel=world.size)
    device, group = join_world("cpu", world), SequenceGroup(world)
    model = ModelConfig(path=str(folder), dtype="float32", gradient_checkpointing=True)
    policy = load_policy(model, temperature=1.0)
    tokens = DeviceTokens.of(pack([np.arange(TOKENS, dtype=np.int32)]), device, group)
    send, sent = comm.all_to_all_single, 0

    def counted(output: torch.Tensor, sending: torch.Tensor, **options: Any) -> Any:
        nonlocal sent
        sent += sending.nbytes - sending[group.rank].nbytes
        return send(output, sending, **options)

    comm.all_to_all_single = counted
    policy(tokens).logprobs.sum().backward()
    return sent


@pytest.mark.stack
@pytest.mark.parametrize("sizes", [TINY, LATENT], ids=["fewer key heads than learners", "latent attention"])
def test_the_bytes_of_an_update_are_those_that_are_counted(sizes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).save_pretrained(tmp_path)
    config = make_config(
        tmp_path,
        cluster={"device": "cpu", "learners": 2, "sequence_parallel": 2},
        model={"gradient_checkpointing": True},
    )
    shape = shape_at(str(tmp_path))
    assert shape is not None
    assert run_world(sent_bytes, 2, tmp_path) == [TOKENS / 2 * speed.exchanged_bytes(shape, config)] * 2


def test_learners_that_share_over_nodes_are_as_fast_as_the_network(long: Callable[..., GRPOConfig]) -> None:
    for per_node, group, on_one_node in ((8, 4, True), (6, 4, False), (6, 3, True), (2, 4, False)):
        config = long(cluster={"learners": 24, "gpus_per_node": per_node, "sequence_parallel": group})
        fast = speed.NVLINK if on_one_node else speed.NETWORK
        assert speed.link_bytes_per_second(config, group) == fast
        assert speed.link_bytes_per_second(config) == speed.NETWORK
