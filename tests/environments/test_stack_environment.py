"""Two steps on the real stack whose rollouts a coroutine or a program drives: turns, a branch, evaluation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import STACK_WAIT_S

from rlhf.quickstart import write_quickstart

pytestmark = pytest.mark.stack

AGREEMENT = 1e-4  # float32: mean difference of log-probs of engine and learner, over every sampled token

PLAY = """
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "", "parameters": {}}}]

async def play(row, generate):
    question = {"role": "user", "content": row["question"]}
    first = await generate([question], tools=TOOLS)
    if first.finish_reason != "stop":
        return 0.0
    asked = [question, first, {"role": "user", "content": "7"}]
    turns = [await generate(asked, tools=TOOLS) for _ in range(2)]  # the second is a branch
    return float(sum(len(turn.token_ids) for turn in turns) % 5)
"""


# the same as a program behind the endpoint
AGENT = """
import json, os, urllib.request

TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "", "parameters": {}}}]

def ask(messages):
    body = json.dumps({"messages": messages, "tools": TOOLS, "temperature": 0.1}).encode()
    headers = {"x-api-key": os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        answer = json.load(answer)
    return answer["choices"][0], answer["usage"]["completion_tokens"]

row = json.load(open(os.environ["RLHF_ROW"]))
question, reward = {"role": "user", "content": row["question"]}, 0.0
first, _ = ask([question])
if first["finish_reason"] != "length":
    asked = [question, first["message"], {"role": "user", "content": "7"}]
    reward = float(sum(ask(asked)[1] for _ in range(2)) % 5)  # the second begins a sequence
json.dump(reward, open(os.environ["RLHF_REWARD"], "w"))
"""


@pytest.mark.parametrize(
    ("algorithm", "doors"),
    [("grpo", ("coroutine", "program")), pytest.param("ppo", ("coroutine",), marks=pytest.mark.faults)],
)
def test_log_probs_of_engine_and_learner_agree_over_turns_and_branches(
    tmp_path: Path, algorithm: str, doors: tuple[str, ...]
) -> None:
    data, samples = tmp_path / "data", 4 * len(doors)
    write_quickstart(data, warmup_steps=0, train_rows=64, test_rows=8, tools=True)
    for file in (data / "train.jsonl", data / "test.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [json.dumps(row | {"environment": doors[i % len(doors)]}) for i, row in enumerate(rows)]
        file.write_text("\n".join(lines))
    (tmp_path / "play.py").write_text(PLAY)
    (tmp_path / "agent.py").write_text(AGENT)
    command = {"name": "program", "command": ["python", f"{tmp_path}/agent.py"]}
    by_name = {"coroutine": f"{tmp_path}/play.py:play", "program": command}
    config: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run"), "steps": 2, "seed": 1},
        "model": {"path": str(data / "model"), "dtype": "float32"},
        "data": {"train": str(data / "train.jsonl"), "eval": str(data / "test.jsonl"), "max_prompt_tokens": 64},
        "environment": {"by_name": {door: by_name[door] for door in doors}},
        "rollout": {
            "prompts_per_step": 8, "samples_per_prompt": samples, "max_response_tokens": 48, "max_rollout_tokens": 144,
        },
        "algo": {"kl_coef": 0.05},
        "learner": {"minibatches_per_epoch": 2, "max_tokens_per_microbatch": 512, "optimizer": {"lr": 1e-3}},
        "reward": [],
        "cluster": {"device": "cpu", "rollout_workers": int(algorithm == "grpo")},  # one as an actor
        "logging": {"wandb": {"mode": "disabled"}},
    }  # fmt: skip
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", f"rlhf.{algorithm}", "--config", str(file)],
        capture_output=True, text=True, timeout=STACK_WAIT_S, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in logged if "time/step" in row]
    assert len(steps) == 2
    for row in steps:
        assert abs(row["policy/engine_kl"]) < AGREEMENT
        assert row["account/failed"] == 0
    assert any("eval/test/avg@1" in row for row in logged)
    rows = [
        json.loads(line)
        for step in (1, 2)
        for line in (tmp_path / "run" / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 2 * 8 * samples
    assert {row["facts"]["ended_by"] for row in rows} <= {"answer", "max_response_tokens"}
    for number, door in enumerate(doors, start=1):
        own = [row for row in rows if int(row["prompt_id"].rpartition("/")[2]) % len(doors) == number % len(doors)]
        branched = [row for row in own if row["facts"]["turns"] == 3]
        assert branched, door
        assert all(len(row["versions"]) == 3 for row in branched)
        if door == "program":
            said = [row for row in branched if row["versions"][0][1] - row["versions"][0][0] < 48]  # not cut
            assert said
            assert all(row["facts"]["calls"] == {"first": 1, "continued": 1, "retried": 1} for row in said)
