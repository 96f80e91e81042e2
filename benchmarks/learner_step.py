"""One optimizer step's gradient with long-tailed lengths: ours, packed and fused, against padded losses.

    python -m benchmarks.learner_step [--device cuda] [--quick]

The same rollouts, weights and loss (clipped surrogate, token mean), vocabulary 151,936, bf16. Four samples share a
prompt of 128 tokens, as long as a question of GSM8K with its template; ours computes it once. Peers, both on padded
microbatches of 8, padded to the longest response of the step as TRL pads: TRL's loss as it is today (its chunked head
inside `add_fused_lm_head`), and the one of full bf16 logits with `selective_log_softmax`. Without an optimizer:
forward, loss, backward. `gradient` is the relative difference of all gradients of the transformer's layers from ours.
On CPU a process warms up on two short rollouts and times one step; on GPU it warms up on the whole step and times
several, the fastest of which counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Case, Row

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.types import Rollout

VOCABULARY, PROMPT, SAMPLES, PADDED_MICROBATCH = 151_936, 128, 4, 8
OURS, TRL, SELECTIVE = "rlhf, packed and fused", "TRL, padded, chunked head", "padded, selective_log_softmax"
CLIP = 0.2
STEPS_ON_GPU = 3


def rollouts_of(count: int, longest: int) -> list[Rollout]:
    """Samples of as many prompts as it takes; log-normal responses with a median of 1/8 of the longest, one has it."""
    from rlhf.types import Rollout, TokenSequence

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(longest / 8), 1.0, count), 4, longest).astype(int)
    lengths[0] = longest
    rollouts = []
    for i, response in enumerate(lengths.tolist()):
        if i % SAMPLES == 0:
            prompt = rng.integers(0, VOCABULARY, PROMPT)
        ids = np.concatenate([prompt, rng.integers(0, VOCABULARY, response)]).astype(np.int32)
        mask = np.arange(len(ids)) >= PROMPT
        sequence = TokenSequence(ids, mask, np.zeros(len(ids), np.float32), ())
        rollouts.append(Rollout(f"p/{i // SAMPLES}", 0, i % SAMPLES, (sequence,), "stop"))
    return rollouts


def model_of(size: dict[str, int], device: str) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**size, vocab_size=VOCABULARY, tie_word_embeddings=True, max_position_embeddings=8192)
    return Qwen2ForCausalLM(config).to(device, torch.bfloat16)


def packed_step(model: Any, rollouts: list[Rollout], advantages: np.ndarray, case: Case) -> None:
    import torch

    from benchmarks.models import run_config
    from rlhf.learner.packed_attention import PACKED
    from rlhf.learner.policy_model import DeviceTokens, PolicyModel
    from rlhf.learner.update import policy_microbatch
    from rlhf.step.batch import broadcast_to_tokens, make_batch
    from rlhf.step.minibatches import plan_epochs
    from rlhf.types import PolicyTargets, Prompt, RolloutGroup, ScoredRollout

    model.set_attn_implementation(PACKED)
    policy = PolicyModel(model, temperature=1.0)
    # The peers have no correction, and these rollouts no log-probs of an engine.
    algo = {"importance_correction": "none"}
    config = run_config("nowhere", algo=algo, learner={"max_tokens_per_microbatch": case["budget"]})
    prompt = Prompt("p", 0, np.zeros(1, np.int32), (), "", "p")
    samples = tuple(ScoredRollout(rollout, "", "", 0.0, {}, "ok") for rollout in rollouts)
    batch = make_batch([RolloutGroup(prompt, samples)], mask_truncated=False)
    ((minibatch,),) = plan_epochs(batch, config, step=0)
    targets = PolicyTargets(broadcast_to_tokens(batch, advantages), None, None)
    for rows in minibatch.microbatches[0]:
        tokens = DeviceTokens.of(batch.tokens.take(rows), torch.device(case["device"]))
        own = targets.take(batch.tokens.token_indices(rows))
        policy_microbatch(policy, tokens, own, minibatch.denominators, config)[0].backward()


def padded_step(model: Any, rollouts: list[Rollout], advantages: np.ndarray, case: Case) -> None:
    import torch
    from trl.trainer.utils import add_fused_lm_head, selective_log_softmax

    if case["variant"] == TRL:
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    sequences = [rollout.sequences[0].token_ids for rollout in rollouts]
    longest = max(map(len, sequences))
    device = case["device"]
    ids = torch.zeros(len(rollouts), longest, dtype=torch.long)
    attention = torch.zeros(len(rollouts), longest, dtype=torch.long)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.from_numpy(sequence)
        attention[i, : len(sequence)] = 1
    ids, attention = ids.to(device), attention.to(device)
    tokens = sum(r.response_length for r in rollouts)
    keep = longest - PROMPT
    for start in range(0, len(rollouts), PADDED_MICROBATCH):
        rows = slice(start, start + PADDED_MICROBATCH)
        batch, seen = ids[rows], attention[rows]
        mask = seen[:, PROMPT:].bool()
        if case["variant"] == TRL:
            labels = batch.masked_fill(seen == 0, -100)
            labels[:, :PROMPT] = -100
            output = model(input_ids=batch, attention_mask=seen, labels=labels, fused_lm_head=True)
            logprobs: Tensor = output.log_probs[:, -keep:]
        else:
            logits = model(input_ids=batch, attention_mask=seen, logits_to_keep=keep + 1).logits[:, :-1]
            logprobs = selective_log_softmax(logits, batch[:, PROMPT:])
        advantage = torch.tensor(advantages[rows], dtype=torch.float32, device=device)[:, None]
        ratio = (logprobs - logprobs.detach()).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        (-(surrogate * mask).sum() / tokens).backward()


def measure(case: Case) -> Row:
    import torch

    model = model_of(case["size"], case["device"])
    step = packed_step if case["variant"] == OURS else padded_step
    rollouts = rollouts_of(case["count"], case["longest"])
    advantages = np.random.default_rng(1).normal(size=len(rollouts)).astype(np.float32)
    device = case["device"]
    warm_up, steps = (rollouts_of(2, 8), 1) if device == "cpu" else (rollouts, STEPS_ON_GPU)

    def run(chosen: list[Rollout]) -> float:
        model.zero_grad(set_to_none=True)
        harness.synchronize(device)
        started = time.perf_counter()
        step(model, chosen, advantages[: len(chosen)], case)
        harness.synchronize(device)
        return time.perf_counter() - started

    run(warm_up)
    model.zero_grad(set_to_none=True)
    with harness.Peak(device) as peak:
        seconds = min(run(rollouts) for _ in range(steps))
    grads = torch.cat([p.grad.float().flatten().cpu() for n, p in model.named_parameters() if "layers" in n])
    np.save(case["gradients"], grads.numpy())
    real = sum(len(r.sequences[0].token_ids) for r in rollouts)
    return {"seconds": seconds, "peak_mib": peak.mib, "real tokens": real, "longest": case["longest"]}


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"measure": measure})
    cuda = options.device == "cuda"
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    size = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, **heads}
    if cuda:  # the size of Qwen2.5-0.5B
        size = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        size |= {"num_attention_heads": 14, "num_key_value_heads": 2}
    count, longest = (64, 4096) if cuda else (8, 64) if options.quick else (12, 512)
    rounds = 1 if options.quick else 3 if cuda else 2
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for i, variant in enumerate((OURS, TRL, SELECTIVE)):
            cases.append({
                "function": "measure", "variant": variant, "size": size, "count": count, "longest": longest,
                "budget": 16384 if cuda else 2048, "device": options.device,
                "gradients": str(Path(folder) / f"{i}.npy"),
            })  # fmt: skip
        measured = harness.interleaved("benchmarks.learner_step", cases, rounds)
        gradients = [np.load(case["gradients"]) for case in cases]
    rows: list[Row] = []
    for case, row, gradient in zip(cases, measured, gradients, strict=True):
        difference = float(np.linalg.norm(gradient - gradients[0]) / np.linalg.norm(gradients[0]))
        rows.append({
            "variant": case["variant"], "seconds": row["seconds"], "real tokens/s": row["real tokens"] / row["seconds"],
            "peak MiB": row["peak_mib"], "ours is faster by": row["seconds"] / measured[0]["seconds"],
            "ours takes of its memory": measured[0]["peak_mib"] / row["peak_mib"], "gradient": difference,
        })  # fmt: skip
    title = f"{count} rollouts, {measured[0]['real tokens']} tokens, longest {longest}, V {VOCABULARY:,}, {size}"
    harness.report("learner_step", title, rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
