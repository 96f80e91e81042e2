"""A loop of one's own on the real stack, in a program of its own; interrupted and resumed, it equals `rlhf grpo`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_stack_grpo import CANARY_BOUND, check_account, read_steps, run_grpo, write_config
from waiting import STACK_WAIT_S

pytestmark = pytest.mark.stack

PROGRAM = """
import contextlib, json, os, signal, sys, threading
import rlhf

config, folder, out, *interrupts = sys.argv[1:]
keys = {"run.dir": folder}
logprobs = []  # of learner and engine, how far apart; before and after an update

def step(trainer):
    groups = trainer.sample(trainer.next_prompts())
    rollouts = [(group.prompt, sample.rollout) for group in groups for sample in group.samples]
    tokens = [(prompt.token_ids, rollout.response_ids) for prompt, rollout in rollouts]
    def distance():
        learner = trainer.logprobs(tokens)
        return max(float(abs(a - b.rollout_logprobs).max()) for a, (_, b) in zip(learner, rollouts, strict=True))
    before = distance()
    trainer.update(groups)
    logprobs.append((before, distance()))
    trainer.publish()

def finish(trainer):
    first = trainer.step
    while trainer.step < trainer.config.run.steps:
        step(trainer)
    trainer.save(out)
    return first

with contextlib.suppress(KeyboardInterrupt), rlhf.Trainer(config, **keys) as trainer:
    step(trainer)
    step(trainer)
    if interrupts:
        trainer.sample(trainer.next_prompts())  # trained only after it is sampled again
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            trainer.evaluate()
    went_on = finish(trainer)
if interrupts:
    with rlhf.Trainer(config, resume=True, **keys) as trainer:
        went_on = finish(trainer)
print(json.dumps({"went_on": went_on, "logprobs": logprobs, "closed": trainer.closed}))
"""


@pytest.mark.parametrize("interrupts", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_a_loop_trains_and_one_that_is_interrupted_and_resumed_has_the_weights_of_rlhf_grpo_bit_for_bit(
    tiny_model_dir: Path, tmp_path: Path, interrupts: bool
) -> None:
    steps = 5 if interrupts else 3
    config = write_config(
        tmp_path, tiny_model_dir, run={"steps": steps, "deterministic": True}, checkpoint={"every": steps},
        logging={"wandb": {"mode": "disabled"}},
    )  # fmt: skip
    own, out, program = tmp_path / "own", tmp_path / "out", tmp_path / "loop.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(config), str(own), str(out), *["interrupts"] * interrupts]
    loop = subprocess.run(command, capture_output=True, text=True, timeout=2 * STACK_WAIT_S, check=False)
    assert loop.returncode == 0, loop.stderr[-3000:]
    result = json.loads(loop.stdout.splitlines()[-1])
    assert (result["went_on"], result["closed"]) == (2, True)
    assert all(before < CANARY_BOUND < after for before, after in result["logprobs"][1:])
    ours = read_steps(own)
    check_account(ours)
    assert [row["step"] for row in ours] == [*range(1, steps + 1)]
    trained = (own / "model/model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == trained
    if not interrupts:
        return

    done = run_grpo("--config", config)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == trained
    theirs = read_steps(tmp_path / "run")
    for name in ("reward/mean", "policy/kl_k3", "learner/grad_norm", "learner/lr"):
        assert [row[name] for row in ours] == [row[name] for row in theirs]


IN_TURNS = """
import asyncio, json, sys
import rlhf, shared_cpu

shared_cpu.allow()
config, *_ = sys.argv[1:]

async def main():
    spans = []
    async with rlhf.Trainer(config) as trainer:
        groups = await trainer.sample_async(await trainer.next_prompts_async())
        while trainer.step < trainer.config.run.steps:
            more = asyncio.ensure_future(trainer.sample_async(await trainer.next_prompts_async()))
            await asyncio.sleep(0.2)  # its requests are under way
            await trainer.update_async(groups)  # the engines sleep
            assert not more.done()
            await trainer.publish_async()
            groups = await more
            spans += [len(sample.rollout.version_spans) for group in groups for sample in group.samples]
        await trainer.drop_async(groups)
    print(json.dumps(spans))

asyncio.run(main())
"""


@pytest.mark.faults
def test_a_loop_samples_ahead_on_shared_gpus(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, tiny_model_dir, cluster={"device": "cpu", "placement": "colocated"},
        rollout={"max_policy_lag": 1, "max_response_tokens": 400}, learner={"max_tokens_per_microbatch": 4096},
        logging={"wandb": {"mode": "disabled"}},
    )  # fmt: skip
    program = tmp_path / "loop.py"
    program.write_text(IN_TURNS)
    command = [sys.executable, str(program), str(config)]
    paths = os.pathsep.join(path for path in sys.path if path)
    loop = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=STACK_WAIT_S,
        check=False,
    )  # fmt: skip
    assert loop.returncode == 0, loop.stderr[-3000:]
    assert max(json.loads(loop.stdout.splitlines()[-1])) == 2
    steps = read_steps(tmp_path / "run")
    check_account(steps)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["sync/canary_difference"] < CANARY_BOUND for row in steps)
