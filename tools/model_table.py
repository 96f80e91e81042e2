"""Train the tiny model of each family on the whole CPU stack, and write the table of docs/records/models.md.

    python tools/model_table.py [--only TYPE ...] [--runs FOLDER]

A model is trained with three steps of `python -m rlhf.grpo` with the canary, on prompts of the quickstart: half a
minute on two idle cores. Each result is kept in FOLDER/TYPE.json, so that an interrupted table goes on where it
stopped; remove a file to run its type again. That the learner computes what transformers does is for
tests/learner/test_families.py to show.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.model_families import MODEL_TYPES, make_family, write_family

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
REASON = r"\b\w*(?:Error|Exception|Refused)\b.*: .*|\bassert [^:]*$|^error: [^;]*|Value error, .*"
# An error that one of these is in has its reason elsewhere in the logs.
GENERIC = "initialization failed|EngineDeadError|Worker failed with|validation error for|be inspected|serializ|pickle"
STACK_LIMIT_S = 300.0
RESPONSE_TOKENS = 40
HEADER = ("type", "class", "layers", "verdict", "canary", "why not ok, and what was changed")

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
    paths = (ROOT, ROOT / "tests" / "stand_ins")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    subprocess.run(["rm", "-rf", str(run)], check=True)
    with (folder.parent / "run.log").open("w") as log:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "rlhf.grpo", "--config", QUICKSTART, *keys], stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, timeout=STACK_LIMIT_S, check=False, env=environment, cwd=ROOT,
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


def result_of(model_type: str, runs: Path) -> dict[str, Any]:
    """The result of a run; "stack" in it is "ok", or why the run ended."""
    model = make_family(model_type)
    folder = write_family(model_type, runs / model_type / "model", **STACK_MODEL.get(model_type, {}))
    return {"class": type(model).__name__, "layers": kinds_of(model), **stack_result(model_type, folder)}


def table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield from (f"| {' | '.join(row)} |" for row in (HEADER, ("---",) * len(HEADER)))
    for model_type, result in results.items():
        ok = result["stack"] == "ok"
        canary, reason = (f"{result['canary']:.0e}", result["changes"]) if ok else ("", result["stack"])
        verdict, escaped = "ok" if ok else "learner only", reason.replace("|", "\\|")
        yield f"| `{model_type}` | `{result['class']}` | {result['layers']} | {verdict} | {canary} | {escaped} |"


def write_table(tool: str, lines: Iterable[str]) -> None:
    """Replace the table of the page in docs/ that has it, between the comments that name this program of tools/."""
    begin, end = f"<!-- table: tools/{tool} -->", f"<!-- end of the table of {tool} -->"
    page = next(page for page in ROOT.glob("docs/**/*.md") if begin in page.read_text())
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/model_table.py", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=MODEL_TYPES, metavar="TYPE", help="these types only")
    parser.add_argument("--runs", type=Path, default=Path("runs/model-table"), help="where results are kept")
    options = parser.parse_args()
    files = {name: options.runs.resolve() / f"{name}.json" for name in MODEL_TYPES}
    for model_type in options.only or MODEL_TYPES:
        if not files[model_type].exists():
            result = json.dumps(result_of(model_type, files[model_type].parent))
            files[model_type].write_text(result)
            print(f"{model_type}: {result}", flush=True)
    results = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    write_table("model_table.py", table(results))


if __name__ == "__main__":
    main()
