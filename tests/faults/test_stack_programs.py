"""Programs behind the endpoint while engines die, weights change and the programs themselves fail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from faulty_run import Fault, run_with_faults
from processes import outliving
from test_stack_grpo import check_account, read_steps, write_config

from rlhf.quickstart import write_quickstart

pytestmark = [pytest.mark.stack, pytest.mark.faults]

# three turns, streamed, with a pause before each of the others
TALK = """
import json, os, time, urllib.error, urllib.request

def ask(messages):
    body = json.dumps({"model": "any", "messages": messages, "stream": True}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    text, ended = "", None
    try:
        answer = urllib.request.urlopen(request, timeout=600)
    except urllib.error.HTTPError as error:
        raise SystemExit(error.read().decode()) from None
    with answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                    ended = choice.get("finish_reason") or ended
    assert ended in ("stop", "length"), ended
    return {"role": "assistant", "content": text}

messages = [{"role": "user", "content": json.load(open(os.environ["RLHF_ROW"]))["question"]}]
for turn in range(3):
    time.sleep(turn and 1.5)
    messages += [ask(messages), {"role": "user", "content": "go on"}]
json.dump(float(len(str(messages)) % 5), open(os.environ["RLHF_REWARD"], "w"))
"""

FAILS = """
import json, os, signal, subprocess, sys, time, urllib.request

body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
urllib.request.urlopen(request).read()
how = json.load(open(os.environ["RLHF_ROW"]))["how"]
if how == "crashes":
    raise ValueError("no such thing")
if how == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "hangs":
    time.sleep(1000)
if how == "forks":
    for _ in range(100):
        subprocess.Popen(["sleep", "1000"])
    time.sleep(1000)
if how == "leaves others":
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
if how == "writes half":
    open(os.environ["RLHF_REWARD"], "w").write('{"score": 1')
elif how != "leaves none":
    json.dump(time.time() % 1, open(os.environ["RLHF_REWARD"], "w"))
"""
HOW = ("works", "crashes", "dies", "hangs", "forks", "leaves others", "writes half", "leaves none")
# of each: the status of its rollouts, and a word of the error
ENDS = {
    "works": ("ok", ""),
    "crashes": ("environment_failed", "no such thing"),
    "dies": ("call_limit", "signal 9"),
    "hangs": ("call_limit", "environment.timeout_s"),
    "forks": ("call_limit", "processes"),
    "leaves others": ("ok", ""),
    "writes half": ("call_limit", "holds no reward"),
    "leaves none": ("not_judged", ""),  # no part of the reward judges it either
}


def rollouts_of(run: Path, steps: int) -> list[dict[str, Any]]:
    files = [run / "rollouts" / f"step-{step:06d}.jsonl" for step in range(1, steps + 1)]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def write_program(folder: Path, source: str, rows: Sequence[dict[str, Any]], /, **overrides: Any) -> Path:
    """The config of a run of a program, with the quickstart's untrained model; `rows` are added to its own."""
    data = folder / "data"
    write_quickstart(data, warmup_steps=0, train_rows=len(rows), test_rows=2, tools=True)
    own = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | more) for row, more in zip(own, rows, strict=True)]
    (data / "train.jsonl").write_text("\n".join(lines))
    (folder / "agent.py").write_text(source)
    environment = {"name": "program", "command": ["python", f"{folder}/agent.py"], "processes": 128}
    overrides["environment"] = {**environment, **overrides["environment"]}
    overrides["rollout"] = {"samples_per_prompt": 8, "max_rollout_tokens": 800, **overrides["rollout"]}
    file = write_config(folder, data, evaluation={"at_start": False, "at_end": False}, **overrides)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"reward": []}))  # the program judges itself
    return file


def test_64_conversations_go_on_while_their_engine_dies_and_weights_change(tmp_path: Path) -> None:
    steps = 5
    config = write_program(
        tmp_path, TALK, [{}] * 64, run={"steps": steps}, environment={"timeout_s": 300},
        rollout={"max_policy_lag": 2, "max_response_tokens": 24}, checkpoint={"every": 1},
        learner={"minibatches_per_epoch": 1, "max_tokens_per_microbatch": 4096},
    )  # fmt: skip
    # while the learner updates, those of the next steps are under way
    ended = run_with_faults(config, [Fault(2, "update", "strike", ("VLLM::EngineCore", "SIGKILL"))])
    assert ended.status == 0, ended.errors[-3000:]
    assert "It is replaced, and its prompts are sampled by another engine." in ended.output
    assert outliving(ended.processes) == []
    logged = read_steps(tmp_path / "run")
    check_account(logged)
    assert [row["account/failed"] for row in logged] == [0] * steps
    rollouts = rollouts_of(tmp_path / "run", steps)
    assert len(rollouts) == 64 * steps
    assert Counter(row["status"] for row in rollouts) == {"ok": len(rollouts)}
    assert {row["facts"]["turns"] for row in rollouts} == {3}
    # new weights came in the middle of conversations, and are recorded by token
    assert any(len({version for *_, version in row["versions"]}) > 1 for row in rollouts)


def test_programs_that_fail_cost_their_rollouts_alone(tmp_path: Path) -> None:
    config = write_program(
        tmp_path, FAILS, [{"how": how} for how in HOW], run={"steps": 1}, rollout={}, checkpoint={"every": None},
        environment={"timeout_s": 20, "max_failed_fraction": 1.0}, learner={"max_tokens_per_microbatch": 4096},
    )  # fmt: skip
    moment = Fault(1, "update", "shell", ("sleep 0.1",))  # its trace has the processes
    ended = run_with_faults(config, [moment])
    assert ended.status == 0, ended.errors[-3000:]
    assert outliving(ended.processes) == []
    rollouts = rollouts_of(tmp_path / "run", 1)
    assert len(rollouts) == 64
    for number, how in enumerate(HOW, start=1):
        own = [row for row in rollouts if row["prompt_id"] == f"train/{number}"]
        status, word = ENDS[how]
        assert len(own) == 8, how
        assert {row["status"] for row in own} == {status}, how
        assert all(word in row["facts"].get("error", "") for row in own), own[0]
