"""Programs behind the endpoint against the doors without HTTP: 64 rollouts at once, sampled tokens per wall second.

    python -m benchmarks.endpoint [--quick]

Long turns: three turns of about 128 tokens, a random model of 10 M parameters; a coroutine and a program that say the
same. Short turns: the quickstart's model for tools, of whose rollouts three in four call (12 tokens, then 9); the class
of `calculator_class.py` and the program of `recipes/04-agent/agent.py`. One engine for all; the doors take turns. The
programs are started before: the clock runs from the first request to the end of the last turn.

Ten turns: the tokens that a learner computes for a conversation of ten turns that is one sequence, beside one row for
each call. CPU only.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks import harness, models
from benchmarks.acting import callers
from benchmarks.harness import Case, Row

ROLLOUTS, START_S = 64, 15.0  # START_S: until all programs have been started
PROGRAM = "program"

PLAY = """
async def play(row, generate):
    messages = [{"role": "user", "content": row["question"]}]
    for _ in range(row["turns"]):
        messages += [await generate(messages), {"role": "user", "content": "go on"}]
    return 0.0
"""

TALK = """
import http.client, json, os, time, urllib.parse

row = json.load(open(os.environ["RLHF_ROW"]))
messages = [{"role": "user", "content": row["question"]}]
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
time.sleep(max(0.0, row["begin"] - time.time()))
client = http.client.HTTPConnection(url.hostname, url.port)
for _ in range(row["turns"]):
    body = json.dumps({"model": "any", "messages": messages})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    client.request("POST", url.path + "/chat/completions", body, headers)
    answer = json.load(client.getresponse())
    if "choices" not in answer:
        break  # after a turn that a limit has cut the context may be full
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
json.dump(0.0, open(os.environ["RLHF_REWARD"], "w"))
"""

WAITS = """
import json, os, time

time.sleep(max(0.0, json.load(open(os.environ["RLHF_ROW"]))["begin"] - time.time()))

"""


def doors(case: Case) -> Row:
    """By door: the tokens per second of each round, and the `lengths` of the last one."""
    return asyncio.run(_doors(case))


async def _doors(case: Case) -> Row:
    from rlhf.cluster.engines import started_engines
    from rlhf.data.model_files import load_tokenizer
    from rlhf.environments.start import StartedEnvironments
    from rlhf.rollout.purpose import texts_purpose
    from rlhf.rollout.worker import RolloutWorker
    from rlhf.types import Prompt

    long, names = case["turn_tokens"], case["doors"]
    configs = {
        door: models.run_config(
            case["model"],
            data={"max_prompt_tokens": 64},
            environment={"processes": ROLLOUTS, **environment},
            rollout={"samples_per_prompt": 8, "prompts_per_step": ROLLOUTS, "kv_cache_gib": 2,
                     "max_response_tokens": long, "max_rollout_tokens": case["turns"] * (long + 20)},
            reward=case["reward"],
            learner={"max_tokens_per_microbatch": 4 * case["turns"] * (long + 20)},
        )
        for door, environment in names.items()
    }  # fmt: skip
    config = next(iter(configs.values()))
    tokenizer = load_tokenizer(config.model)
    started: list[float] = []
    ended: list[float] = []

    rows: dict[str, Row] = {door: {"speeds": []} for door in names}
    async with started_engines(config, trains=False) as engines:

        async def generate(*arguments: Any, **options: Any) -> Any:
            started.append(time.perf_counter())
            completions = await engines.choice.generate(*arguments, **options)
            ended.append(time.perf_counter())
            return completions

        played = {door: StartedEnvironments(own, tokenizer) for door, own in configs.items()}
        try:
            for number in range(case["rounds"] + 1):
                for door, own in configs.items():
                    worker = RolloutWorker(own, tokenizer, generate, cast(Any, None), played[door])
                    row = {"turns": case["turns"], "begin": time.time() + START_S}
                    text = [f"What is {n} * {number + 11}?" for n in range(11, 11 + ROLLOUTS)]
                    prompts = [
                        Prompt(f"p/{n}", 0, np.array(tokenizer(question)["input_ids"], np.int32),
                               ({"role": "user", "content": question},), "1", "p", row | {"question": question})
                        for n, question in enumerate(text)
                    ]  # fmt: skip
                    started.clear()
                    purpose = texts_purpose(own, None)
                    groups = await asyncio.gather(*(worker.rollout_group(p, purpose) for p in prompts))
                    rollouts = [sample.rollout for group in groups for sample in group.samples]
                    failed = [one.outcome for one in rollouts if one.outcome is None or one.outcome.status != "ok"]
                    assert not failed, failed[0]
                    seconds = max(ended) - min(started)
                    if number:  # the first compiles and fills caches
                        rows[door]["speeds"].append(sum(one.response_length for one in rollouts) / seconds)
                    rows[door] |= lengths(rollouts)
        finally:
            for each in played.values():
                each.close()
    return rows


def lengths(rollouts: Any) -> Row:
    """Turns, tokens that a learner computes for the sequences, and for one row for each call, per rollout."""
    turns = sequence_tokens = row_tokens = 0
    for sequence in (sequence for rollout in rollouts for sequence in rollout.sequences):
        mask = np.append(sequence.response_mask, False)
        ends = np.flatnonzero(mask[:-1] & ~mask[1:]) + 1
        turns += len(ends)
        sequence_tokens += len(sequence.token_ids)
        row_tokens += int(ends.sum())
    return {
        "turns": turns / len(rollouts),
        "sequences": sum(len(rollout.sequences) for rollout in rollouts) / len(rollouts),
        "tokens as sequences": sequence_tokens / len(rollouts),
        "tokens as rows": row_tokens / len(rollouts),
    }


def cases_in(folder: Path, *, quick: bool) -> dict[str, Case]:
    """The cases by name: a model, and the doors through which it is asked."""
    (folder / "play.py").write_text(PLAY)
    (folder / "talk.py").write_text(TALK)
    agent = Path("recipes/04-agent/agent.py").read_text()
    (folder / "agent.py").write_text(agent.replace("with open", f"{WAITS}with open", 1))
    programs = {file: {"name": PROGRAM, "command": ["python", f"{folder}/{file}.py"]} for file in ("talk", "agent")}
    talks = {"coroutine": {"name": f"{folder}/play.py:play"}, PROGRAM: programs["talk"]}
    tool = Path(__file__).with_name("calculator_class.py")
    calculates = {"class": {"name": f"{tool}:Calculator"}, PROGRAM: programs["agent"]}
    length = 16 if quick else 128
    long, short = (str(models.random_model("10m", dtype="float32", mean_length=mean)) for mean in (length, 32))
    caller = str(callers(models.FOLDER / "callers") / "model")
    return {
        "long turns": {"model": long, "turns": 3, "turn_tokens": 8 * length, "reward": {"parts": []}, "doors": talks},
        "short turns": {
            "model": caller, "turns": 3, "turn_tokens": 20, "reward": {"parts": [f"{tool}:right"]}, "doors": calculates
        },
        "ten turns": {"model": short, "turns": 10, "turn_tokens": 256, "reward": {"parts": []}, "doors": talks},
    }  # fmt: skip


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"doors": doors})
    rounds = 1 if options.quick else 3
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for what, case in cases_in(Path(folder), quick=options.quick).items():
            found = harness.fresh("benchmarks.endpoint", {"function": "doors", "rounds": rounds, **case})
            first, *_ = (statistics.median(found[door]["speeds"]) for door in case["doors"])
            for door in case["doors"]:
                row = found[door]
                speed = statistics.median(row.pop("speeds"))
                rows.append(
                    {"rollouts": what, "door": door, "tokens/s": speed, "x the first door": speed / first} | row
                )
    harness.report("endpoint", f"{ROLLOUTS} rollouts at once, median of {rounds}", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
