"""The share of weights that a step changes, and seconds of `weights.transfer=delta` compared with a whole transfer.

    python -m benchmarks.changes [--model FOLDER] [--gbit 1] [--lr 1e-6 1e-5] [--quick]

On CPU: two learners, two engines that are told to be on another node than the learners, and a token bucket in the
sockets of learner 0 in place of the network (link.c). 20 steps on responses that the engines sample, with random
rewards, since the size of Adam's steps does not depend on them, at lr 1e-6 and 1e-5. After half of the steps the engine
that receives is killed and replaced. At the end everything is sent, three times, for the seconds. What the engines hold
is compared before and after both whole transfers, bit for bit and layer by layer: each packed matrix of vLLM is read by
multiplying the identity with it.

The model is runs/real-model-data/SmolLM2-135M-Instruct, which `make real-model` makes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness, models
from benchmarks.harness import Case, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from rlhf.cluster.engines import Engines
    from rlhf.config.grpo import GRPOConfig
    from rlhf.sampling.requests import Completion
    from rlhf.types import RolloutGroup

MODEL = Path("runs/real-model-data/SmolLM2-135M-Instruct")
GROUPS, SAMPLES, TOKENS = 4, 4, 24
WHOLE_TRANSFERS = 3


def digest(wrapper: Any) -> dict[str, int]:
    """In a worker of vLLM: a checksum of each layer's weights, as the layer computes with them."""
    import torch

    found = {}
    for name, module in wrapper.worker.model_runner.get_model().named_modules():
        own = {key: value.detach() for key, value in module.named_parameters(recurse=False) if value.numel()}
        if hasattr(module, "cpu_linear"):
            columns = getattr(module, "input_size_per_partition", None) or module.embedding_dim
            dtype = next(iter(wrapper.worker.model_runner.get_model().parameters())).dtype
            own["product"] = module.cpu_linear(torch.eye(columns, dtype=dtype), module.weight, None)
        for key, value in own.items():
            found[f"{name}.{key}"] = zlib.crc32(value.contiguous().view(torch.uint8).numpy().data)
    return found


def hold_link(learner: Any, bytes_per_second: float) -> None:
    """In a learner: from now on its sockets are slow, if it is the one that sends."""
    import ctypes

    hold = ctypes.CDLL(None).hold_link
    hold.argtypes = [ctypes.c_double]
    hold(bytes_per_second if learner.world.rank == 0 else 0.0)


def send_all_next(learner: Any) -> None:
    learner._sender._complete = False


def rollout(prompt: Any, sample: int, completion: Completion, reward: float) -> Any:
    import numpy as np

    from rlhf.types import Rollout, ScoredRollout, TokenSequence

    ids = np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int32)
    sampled = np.arange(len(ids)) >= len(prompt.token_ids)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[sampled] = completion.logprobs
    sequence = TokenSequence(ids, sampled, logprobs, completion.version_spans)
    done = Rollout(prompt.id, 0, sample, (sequence,), completion.finish_reason)
    return ScoredRollout(done, "", "", reward, {}, "ok")


async def sampled(engines: Engines, prompts: Sequence[Any], random: np.random.Generator) -> list[RolloutGroup]:
    """Responses of the engines with random rewards."""
    from rlhf.sampling.requests import SamplingSettings
    from rlhf.types import RolloutGroup

    settings = SamplingSettings(1.0, TOKENS)
    answers = await asyncio.gather(*(engines.choice.generate(p.token_ids, settings, samples=SAMPLES) for p in prompts))
    return [
        RolloutGroup(prompt, tuple(rollout(prompt, i, one, float(random.random())) for i, one in enumerate(own)))
        for prompt, own in zip(prompts, answers, strict=True)
    ]


async def learn(engines: Engines, config: GRPOConfig, groups: list[RolloutGroup], step: int) -> None:
    from rlhf.step.advantages import step_advantages
    from rlhf.step.batch import broadcast_to_tokens, make_batch
    from rlhf.step.minibatches import plan_epochs
    from rlhf.types import PolicyTargets

    batch = make_batch(groups, mask_truncated=False)
    advantages = step_advantages(batch, batch.rewards, config.algo.advantage)
    await engines.learners.start_step(batch, plan_epochs(batch, config, step=step))
    await engines.update_learners(PolicyTargets(broadcast_to_tokens(batch, advantages), None, None))


async def send(engines: Engines, version: int) -> Row:
    started = time.perf_counter()
    metrics = await engines.publish(version, no_check)
    return {"seconds": time.perf_counter() - started, **metrics}


async def no_check(_version: int) -> dict[str, float]:
    return {}


class Listed:
    """Hears which engines are ready."""

    def __init__(self) -> None:
        self.engines: Any = {}  # number -> its actor, and where it is

    def update(self, _number: int, engines: Any, _failure: str | None = None) -> None:
        self.engines = engines


async def replace_receiver(engines: Engines) -> float:
    """Kill engine 0 -> seconds until a new one has the weights."""
    import ray

    started, killed, listed = time.perf_counter(), engines.group.actors[0], Listed()
    engines.recovery.subscribe(listed)
    ray.kill(killed)
    while 0 not in listed.engines or listed.engines[0][0] is killed:
        await asyncio.sleep(0.1)
    engines.recovery.unsubscribe(listed)
    return time.perf_counter() - started


def steps(case: Case) -> Row:
    """The run at one learning rate."""
    import numpy as np
    from transformers import AutoTokenizer

    from rlhf.cluster.cluster import Cluster
    from rlhf.cluster.engines import Engines
    from rlhf.types import Prompt

    config = models.run_config(
        case["model"],
        run={"steps": case["steps"]},
        rollout={"prompts_per_step": GROUPS, "samples_per_prompt": SAMPLES, "max_response_tokens": TOKENS,
                 "kv_cache_gib": 0.25},
        learner={"max_tokens_per_microbatch": 512, "optimizer": {"lr": case["lr"]}},
        cluster={"device": "cpu", "learners": 2, "engines": 2},
        weights={"transfer": "delta"},
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    texts = [f"{a} + {b} =" for a, b in np.random.default_rng(0).integers(0, 99, (GROUPS * case["steps"], 2))]
    prompts = [Prompt(text, 0, np.array(tokenizer(text)["input_ids"], np.int32), (), "", "") for text in texts]

    class Elsewhere(Engines):
        """Engines that seem to be on another node."""

        async def _connection(self) -> Any:
            backend, client, meeting = await super()._connection()
            return backend, client, dataclasses.replace(meeting, engine_nodes=("there",) * len(meeting.engine_nodes))

    async def held(engines: Engines) -> list[dict[str, int]]:
        return [held for (held,) in await engines.group.call(lambda engine: engine.on_workers(digest))]

    async def run() -> Row:
        async with Cluster(config) as cluster, Elsewhere(cluster, config) as engines:
            await engines.learners.call(lambda learner: learner.apply(hold_link, case["gbit"] * 1e9 / 8))
            engines.replace_lost(no_check)
            first, sent, random = await send(engines, 0), [], np.random.default_rng(0)
            equal, replaced_s = [], 0.0
            for step in range(case["steps"]):
                own = prompts[step * GROUPS : (step + 1) * GROUPS]
                await learn(engines, config, await sampled(engines, own, random), step)
                sent.append(await send(engines, step + 1))
                print(f"step {step + 1}: {sent[-1]}", file=sys.stderr, flush=True)
                if step + 1 == case["steps"] // 2:
                    before = await held(engines)
                    replaced_s = await replace_receiver(engines)
                    equal.append(before[0] == before[1] and before == await held(engines))
            before, whole = await held(engines), []
            for _ in range(WHOLE_TRANSFERS):
                await engines.learners.call(lambda learner: learner.apply(send_all_next))
                whole.append(await send(engines, case["steps"]))
            equal.append(before[0] == before[1] and before == await held(engines))
            return {"layers": len(before[0]), "equal": equal, "replaced_s": replaced_s, "first": first, "sent": sent,
                    "whole": whole}  # fmt: skip

    return asyncio.run(run())


def middle(rows: Sequence[Row], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--gbit", type=float, default=1.0, help="of the link, per second")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    options = parser.parse_args()
    harness.run_if_case(options, {"steps": steps})
    model = models.random_model("10m") if options.quick else options.model.resolve()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "link.so")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("link.c"), "-ldl"],
                       check=True)  # fmt: skip
        for lr in options.lr:
            case = {"function": "steps", "model": str(model), "lr": lr, "gbit": options.gbit}
            case["steps"] = 4 if options.quick else 20
            environment = {"LD_PRELOAD": str(library), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
            found = harness.fresh("benchmarks.changes", case, environment=environment)
            sent, whole = found["sent"], found["whole"]
            changed = [row["weights/changed"] for row in sent]
            rows.append({
                "lr": lr, "steps": len(changed), "changed": statistics.mean(changed), "most": max(changed),
                "MiB": middle(sent, "weights/sent_mib"), "whole, MiB": middle(whole, "weights/sent_mib"),
                "seconds": middle(sent, "seconds"), "whole, s": middle(whole, "seconds"),
                "engine replaced, s": found["replaced_s"], "weights equal": f"{all(found['equal'])}, {found['layers']}",
            })  # fmt: skip
    harness.report("changes", f"changes of {model.name}, link of {options.gbit:g} Gbit/s", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
