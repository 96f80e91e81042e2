"""Run the tiny model of each family in the learner and on the whole CPU stack, and write the table of docs/models.md.

    python tools/model_table.py [--only TYPE ...] [--learner-only] [--runs FOLDER]

Each result is kept in FOLDER/TYPE.json, so that an interrupted table goes on where it stopped; remove a file to run its
type again. A stack run takes half a minute on two idle cores; two of these programs may share the types by --only.

Learner: a packed row, whose sequences begin alike and are three times as long as the windows, against transformers'
own model on each sequence alone: log-probs, and gradients of a weighted sum of them, with gradient checkpointing.
Stack: three steps of `python -m rlhf.grpo` with the canary, on prompts of the quickstart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.model_families import MODEL_TYPES, write_family

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
QUICKSTART = PAGE.parent.parent / "configs" / "quickstart.yaml"
BEGIN, END = "<!-- table: tools/model_table.py -->", "<!-- end of the table -->"
BOUND = 1e-5  # of log-probs, and of gradients relative to their norm
REASON = r"\b\w*(?:Error|Exception|Refused)\b.*: .*|\bassert [^:]*$|^error: [^;]*|Value error, .*"
# An error that one of these is in has its reason elsewhere in the logs.
GENERIC = "initialization failed|EngineDeadError|Worker failed with|validation error for|be inspected|serializ|pickle"
STACK_LIMIT_S = 300.0
PROMPT_TOKENS, RESPONSE_TOKENS = 20, 40
HEADER = (
    "type", "class", "layers", "verdict", "log-probs", "gradients", "canary", "why not ok, and what was changed",
)  # fmt: skip

# What vLLM's kernels for CPU ask for, apart from the families' tiny sizes: keys of the run, and of the model.
DELTA_RULES = ("qwen3_next", "olmo_hybrid", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
STACK_KEYS = {name: ["model.dtype=bfloat16"] for name in DELTA_RULES} | {
    "kimi_linear": ["rollout.on_weight_update=keep_kv"]  # no prefix caching
}
STACK_MODEL: dict[str, dict[str, Any]] = {
    "llama4": {"attention_chunk_size": 128},
    "llama4_text": {"attention_chunk_size": 128},
    "cohere2": {"sliding_window": 128},  # vLLM's windows of Cohere 2 have a token more than transformers'
    "phimoe": {"lm_head_bias": False},  # vLLM leaves the bias out
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},  # no experts
} | {name: {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64} for name in ("deepseek_v2", "deepseek_v3")}
STACK_MODEL |= {name: {"head_dim": 64} for name in ("qwen3_5_text", "qwen3_5_moe_text")}


def letters(response: str, **_: Any) -> float:
    """A reward that differs between the responses of an untrained model: the share of letters."""
    return sum(character.isalpha() for character in response) / max(len(response), 1)


# --- the learner alone ---


def learner_result(folder: Path) -> dict[str, Any]:
    """How far the packed row is from single sequences, and what kind of model it is."""
    import torch

    torch.set_num_threads(1)
    sequences, weights = make_sequences()
    expected, expected_gradients, model = alone(folder, sequences, weights)
    result: dict[str, Any] = {"class": type(model).__name__, "layers": kinds_of(model)}
    try:
        found, gradients = packed(folder, sequences, weights)
    except Exception as error:  # whatever a family does is a result of this table
        traceback.print_exc()
        return result | {"refused": reason_of(f"{type(error).__name__}: {error}")}
    difference = np.concatenate([np.abs(a - b) for a, b in zip(found, expected, strict=True)])
    squares = [(expected_gradients[name] - gradients[name]).square().sum() for name in expected_gradients]
    norm = sum(gradient.square().sum() for gradient in expected_gradients.values())
    return result | {"logprobs": float(difference.max()), "gradients": float((sum(squares) / norm) ** 0.5)}


def make_sequences() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Token ids [L] of five sequences, four with a common beginning, and a random weight for each token."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 256, PROMPT_TOKENS)
    sequences = [np.concatenate([prompt, rng.integers(0, 256, length)]) for length in (28, 9, 33, 17)]
    sequences.append(rng.integers(0, 256, 48))
    return [ids.astype(np.int32) for ids in sequences], [rng.normal(size=len(ids)) for ids in sequences]


def alone(folder: Path, sequences: list[np.ndarray], weights: list[np.ndarray]) -> tuple[list[np.ndarray], Any, Any]:
    """transformers' log-probs [L - 1] of each sequence, the gradients, and the model."""
    import torch

    from rlhf.learner.text_model import language_model

    _, kind = language_model(str(folder), trust_remote_code=False)
    # sdpa leaves out caps and sinks
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logprobs = []
    for ids, weight in zip(sequences, weights, strict=True):
        tokens = torch.from_numpy(ids).long()
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        values = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        (values * torch.from_numpy(weight[1:])).sum().backward()
        logprobs.append(values.detach().numpy())
    return logprobs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, model


def packed(folder: Path, sequences: list[np.ndarray], weights: list[np.ndarray]) -> tuple[list[np.ndarray], Any]:
    """The same from the learner's model, in one row."""
    import torch

    from rlhf.algo.packing import pack
    from rlhf.config.sections import ModelConfig
    from rlhf.learner.policy_model import DeviceTokens, check_packed, load_policy

    config = ModelConfig(path=str(folder), dtype="float32", gradient_checkpointing=True)
    policy = load_policy(config, temperature=1.0)
    device = torch.device("cpu")
    check_packed(lambda tokens: policy(tokens).logprobs, device, dtype="float32", key="model.path", path=folder.name)
    row = pack(sequences)
    values = policy(DeviceTokens.of(row, device)).logprobs
    (values * torch.from_numpy(np.concatenate([np.append(0, weight[1:]) for weight in weights]))).sum().backward()
    parts = np.split(values.detach().numpy(), row.cu_seqlens[1:-1])
    gradients = {name.removeprefix("transformer."): p.grad for name, p in policy.named_parameters()}
    return [part[1:] for part in parts], gradients


def kinds_of(model: Any) -> str:
    """What of the family's layers is not a plain dense transformer."""
    from rlhf.learner.text_model import decoder_of

    config, names = model.config.get_text_config(), [name for name, _ in decoder_of(model).named_parameters()]
    kinds = set(getattr(config, "layer_types", None) or ())
    windowed = kinds & {"sliding_attention", "chunked_attention"} if kinds else getattr(config, "sliding_window", None)
    has = {
        "wrapped": config is not model.config,
        "hybrid": any(re.search(r"A_log|conv", name) for name in names) or "linear_attention" in kinds,
        "windows": windowed,
        "experts": any("experts" in name for name in names),
        "latent attention": getattr(config, "kv_lora_rank", None),
        "sinks": any("sinks" in name for name in names),
        "capped": getattr(config, "final_logit_softcapping", None),
        "scaled logits": getattr(config, "logits_scaling", None) or getattr(config, "logit_scale", None),
    }
    return ", ".join(kind for kind, present in has.items() if present) or "dense"


# --- the whole stack ---


def stack_result(model_type: str, folder: Path) -> dict[str, Any]:
    """Three steps of GRPO: the largest canary difference, or why the run ended."""
    from rlhf.quickstart import make_problems, write_rows

    run = folder.parent / "run"
    rows = [{"question": problem.question, "answer": problem.answer} for problem in make_problems(64, 0)]
    write_rows(folder.parent / "train.jsonl", rows)
    keys = [
        f"model.path={folder}", f"data.train={folder.parent / 'train.jsonl'}", "data.eval=null", f"run.dir={run}",
        "run.steps=3", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
        f"rollout.max_response_tokens={RESPONSE_TOKENS}", "rollout.max_concurrent_sequences=16",
        "reward=[{name: 'tools.model_table:letters'}]", "learner.max_tokens_per_microbatch=512",
        "learner.minibatches_per_epoch=1", "learner.optimizer.lr=1e-3", "learner.schedule.warmup_steps=0",
        "checkpoint.every=null", "evaluation.every=null", "logging.wandb.mode=disabled",
        *STACK_KEYS.get(model_type, ()),
    ]  # fmt: skip
    paths = (PAGE.parent.parent, PAGE.parent.parent / "tests" / "stand_ins")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    subprocess.run(["rm", "-rf", str(run)], check=True)
    with (folder.parent / "run.log").open("w") as log:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "rlhf.grpo", "--config", QUICKSTART, *keys], stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, timeout=STACK_LIMIT_S, check=False, env=environment, cwd=PAGE.parent.parent,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"stack": f"no end within {STACK_LIMIT_S:.0f} s"}
    if done.returncode:
        actors = "".join(path.read_text() for path in sorted((run / "logs").glob("worker*")))
        return {"stack": reason_of((folder.parent / "run.log").read_text() + actors)}
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "time/step" in step]
    assert len(steps) == 3, f"{run}: {len(steps)} steps in metrics.jsonl"
    assert all(step["learner/grad_norm"] > 0 for step in steps), f"{run}: a step without a gradient"
    check_export(run / "model", folder)
    return {
        "stack": "ok",
        "canary": max(step["sync/canary_difference"] for step in steps),
        "changes": ", ".join([*STACK_KEYS.get(model_type, ()), *map("=".join, _changes(model_type))]),
    }


def check_export(folder: Path, start: Path) -> None:
    """The exported model has the tensors of the start model, and those are what transformers wants."""
    from rlhf.check.model_shape import stored_tensors
    from rlhf.learner.text_model import language_model

    _, kind = language_model(str(folder), trust_remote_code=False)
    _, report = kind.from_pretrained(folder, output_loading_info=True)
    wrong = {key: names for key, names in report.items() if names}
    assert not wrong, f"{folder}: {wrong}"
    assert stored_tensors(str(folder)).keys() == stored_tensors(str(start)).keys(), f"{folder}: other tensors"


def _changes(model_type: str) -> list[tuple[str, str]]:
    return [(key, str(value)) for key, value in STACK_MODEL.get(model_type, {}).items()]


def reason_of(text: str) -> str:
    """The message of the last exception in a log, or its last line; that an engine did not start is not the reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not re.search(GENERIC, line)]
    errors = [found[0] for line in lines if (found := re.search(REASON, line))]
    return re.sub(r" What the actors .*|\x1b\[[0-9;]*m|\s+", " ", (errors or lines or ["no message"])[-1])[:300]


# --- the table ---


def run_type(model_type: str, runs: Path, kept: dict[str, Any], *, learner_only: bool) -> dict[str, Any]:
    """Add to the kept result what it lacks."""
    if "refused" in kept or "stack" in kept or (kept and learner_only):
        return kept
    folder = write_family(model_type, runs / model_type / "model")
    result = kept or learner_result(folder)
    if "refused" not in result and not learner_only:
        if model_type in STACK_MODEL:
            write_family(model_type, folder, **STACK_MODEL[model_type])
        result |= stack_result(model_type, folder)
    return result


def verdict_of(result: dict[str, Any]) -> str:
    if "refused" in result or max(result["logprobs"], result["gradients"]) > BOUND:
        return "refused"
    return "ok" if result.get("stack") == "ok" else "learner only"


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = [HEADER, ("---",) * len(HEADER)]
    for model_type, result in results.items():
        reason = result.get("refused") or result.get("changes") or result.get("stack", "not run")
        number = {key: f"{result[key]:.0e}" if key in result else "" for key in ("logprobs", "gradients", "canary")}
        rows.append((
            f"`{model_type}`", f"`{result['class']}`", result["layers"], verdict_of(result), number["logprobs"],
            number["gradients"], number["canary"], "" if reason == "ok" else reason.replace("|", "\\|"),
        ))  # fmt: skip
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_table(results: dict[str, dict[str, Any]]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/model_table.py", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=MODEL_TYPES, metavar="TYPE", help="these types only")
    parser.add_argument("--learner-only", action="store_true", help="leave the stack out")
    parser.add_argument("--runs", type=Path, default=Path("runs/model-table"), help="where results are kept")
    options = parser.parse_args()
    runs = options.runs.resolve()
    for model_type in options.only or MODEL_TYPES:
        file = runs / f"{model_type}.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        result = run_type(model_type, runs, kept, learner_only=options.learner_only)
        file.write_text(json.dumps(result))
        print(f"{model_type}: {verdict_of(result)} {json.dumps(result)}", flush=True)
    kept_results = {name: runs / f"{name}.json" for name in MODEL_TYPES}
    write_table({name: json.loads(kept.read_text()) for name, kept in kept_results.items() if kept.exists()})


if __name__ == "__main__":
    main()
