"""Whole runs in which rewards, numbers, the disk or a service are broken: they go on, or end with one message."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from faulty_run import Ended, Fault, run_with_faults
from processes import outliving
from test_stack_grpo import check_account, read_steps, write_config
from waiting import free_port

from rlhf.run.folder import RunFolder

pytestmark = [pytest.mark.stack, pytest.mark.faults]

HOSTILE = Path(__file__).parent.parent / "fixtures" / "hostile_rewards.py"


def read_rollouts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted((run / "rollouts").iterdir()) for line in file.read_text().splitlines()]


# --- rewards ---

REWARDS = {  # what the reward does with a response -> the status of that response
    "raise": "failed", "exit": "failed", "nan": "failed", "text": "failed", "two": "failed",
    "none": "unscorable",
    "sleep": "timeout", "spin": "timeout", "fork": "timeout",
    "crash": "died", "allocate": "died",
    "detach": "ok",
}  # fmt: skip


@pytest.fixture(scope="module")
def hostile_run(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """One prompt for each fault, and four that are graded as usual; two steps take all 16."""
    folder = tmp_path_factory.mktemp("rewards")
    rows = [json.loads(line) for line in (tiny_model_dir / "train.jsonl").read_text().splitlines()[:16]]
    faults = [*REWARDS, *["one"] * 4]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({**row, "fault": f}) + "\n" for row, f in zip(rows, faults, strict=True)))
    length = {"name": "length", "max_tokens": 24, "buffer_tokens": 20}
    reward = {"parts": [length, {"name": f"{HOSTILE}:by_column"}], "failure_fraction": 1.0}
    config = write_config(
        folder, tiny_model_dir, run={"steps": 2}, data={"train": str(data), "eval": None},
        rollout={"samples_per_prompt": 2},
    )  # fmt: skip
    look = Fault(2, "checkpoint", "shell", ("true",))  # at the processes
    return run_with_faults(config, [look], f"reward={json.dumps(reward)}"), folder / "run"


@pytest.mark.parametrize("fault", REWARDS)
def test_a_hostile_reward_costs_its_own_responses_alone(hostile_run: tuple[Ended, Path], fault: str) -> None:
    ended, run = hostile_run
    assert ended.status == 0, ended.errors[-3000:]
    row_number = [*REWARDS].index(fault) + 1
    samples = [row for row in read_rollouts(run) if row["prompt_id"] == f"train/{row_number}"]
    assert [row["status"] for row in samples] == [REWARDS[fault]] * 2
    assert all((row["reward"] is None) == (REWARDS[fault] != "ok") for row in samples)
    assert all(row["advantage"] == 0 for row in samples if row["reward"] is None)


def test_after_hostile_rewards_the_others_were_trained_and_no_process_is_left(hostile_run: tuple[Ended, Path]) -> None:
    ended, run = hostile_run
    steps, statuses = read_steps(run), Counter(row["status"] for row in read_rollouts(run))
    check_account(steps)
    told = [line for line in ended.output.splitlines() if "by_column: " in line and " calls failed with " in line]
    assert len(told) == 5  # distinct errors of a function, whatever their number
    assert statuses == Counter(ok=2 * 5, failed=2 * 5, unscorable=2, timeout=2 * 3, died=2 * 2)
    assert (steps[-1]["account/trained"], steps[-1]["account/failed"]) == (10, 22)
    assert outliving(ended.processes) == []


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["rollout.max_response_tokens=1", "algo.mask_truncated=true", "run.max_useless_steps=1", "run.steps=50"],
            [
                "error: run.max_useless_steps=1: the last 1 steps taught the policy nothing: no rollout was trained on",
                "100% of the responses did not stop by themselves. Raise rollout.max_response_tokens=1",
            ],
        ),
        (
            ["run.max_useless_steps=2", "run.steps=50", "reward=[{name: exact}]"],
            [
                "error: run.max_useless_steps=2: the last 2 steps taught the policy nothing: no group had a signal",
                "All responses have the same reward: read some (rlhf.show).",
            ],
        ),
        (
            [f"reward=[{{name: '{HOSTILE}:fails_in_training'}}]"],
            [
                "error: reward '", "11 of 11 calls failed, last for train/", "(failed: ",
                "more than reward.failure_fraction=0.02 allows. Repair the function or its endpoint, or raise the ",
            ],
        ),
    ],
    ids=["all responses are cut off", "all rewards are equal", "the reward raises too often"],
)  # fmt: skip
def test_a_run_that_learns_nothing_ends_with_one_message(
    tiny_model_dir: Path, tmp_path: Path, overrides: list[str], messages: list[str]
) -> None:
    ended = run_with_faults(write_config(tmp_path, tiny_model_dir, data={"eval": None}), [], *overrides)
    assert ended.status == 1, ended.errors[-3000:]
    assert [message for message in messages if message not in ended.errors] == []
    assert "Traceback" not in ended.errors


# --- weights ---


def test_a_tensor_that_an_engine_no_longer_loads_ends_the_run_with_its_name(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    config = write_config(tmp_path, tiny_model_dir, run={"steps": 100}, data={"eval": None})
    lost = Fault(3, "transfer", "lose_weights", ("0", name))
    ended = run_with_faults(config, [lost], VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    assert ended.status == 1, ended.errors[-3000:]
    assert f"error: weight transfer to engine 0: {name}: vLLM loaded 0 of " in ended.errors
    assert "Traceback" not in ended.errors
    assert "Restart 1" not in ended.output  # it would happen again
    assert [step["step"] for step in read_steps(tmp_path / "run")] == [1, 2]
    assert outliving(ended.processes) == []


# --- numbers ---

NUMBERS = {  # step -> the fault, how many of the step's two updates are skipped, and what is said of them
    2: (Fault(2, "logprobs", "poison", ("nan_in_logits", "0")), 2, "NaN or inf in old_logprobs of"),
    3: (Fault(3, "update", "poison", ("nan_in_gradient", "1")), 1, "NaN or inf in a gradient"),
    5: (Fault(4, "update", "nan_in_engine_logprob"), 2, "NaN or inf in rollout_logprobs of 1 "),
    7: (Fault(7, "update", "poison", ("nan_in_every_gradient", "1")), 2, "NaN or inf in a gradient"),
}


@pytest.fixture(scope="module")
def spoiled_run(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("numbers")
    config = write_config(
        folder, tiny_model_dir, run={"steps": 100, "max_useless_steps": 2}, data={"eval": None},
        cluster={"learners": 2}, checkpoint={"every": 1},
    )  # fmt: skip
    return run_with_faults(config, [fault for fault, *_ in NUMBERS.values()]), folder / "run"


@pytest.mark.parametrize("step", NUMBERS)
def test_a_number_that_is_not_finite_costs_its_updates_on_all_ranks_and_no_weight(
    spoiled_run: tuple[Ended, Path], step: int
) -> None:
    ended, run = spoiled_run
    _, skipped, told = NUMBERS[step]
    (warning,) = [line for line in ended.output.splitlines() if f"step {step}: {skipped} of 2 optimizer steps" in line]
    assert told in warning
    before, after = [row for row in read_steps(run) if row["step"] in (step - 1, step)]
    assert after["learner/updates_skipped"] - before["learner/updates_skipped"] == skipped
    assert after["learner/updates_taken"] - before["learner/updates_taken"] == 2 - skipped
    assert after["sync/canary_difference"] < 1e-4


def test_a_run_whose_every_update_is_skipped_ends_with_the_reason(spoiled_run: tuple[Ended, Path]) -> None:
    ended, run = spoiled_run
    assert ended.status == 1
    ending = "the last 2 steps taught the policy nothing: every optimizer step was skipped (2)."
    assert f"error: run.max_useless_steps=2: {ending}" in ended.errors
    assert "Lower learner.optimizer.lr" in ended.errors
    assert "Traceback" not in ended.errors
    steps = read_steps(run)
    assert [row["step"] for row in steps] == [*range(1, 9)]
    check_account(steps)
    assert RunFolder(run, resume=True).saved_step >= 7


# --- the disk ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, that is full when it is full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_stays_full_from_the_log_of_a_step_on_ends_the_run_and_with_room_it_is_resumed_without_a_gap(
    small_disk: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    run, full = small_disk / "run", f"cat /dev/zero >{small_disk}/filler 2>/dev/null; true"
    config = write_config(
        tmp_path, tiny_model_dir, run={"steps": 4, "dir": str(run)}, data={"eval": None}, checkpoint={"every": 1}
    )
    ended = run_with_faults(config, [Fault(3, "canary", "shell", (full,))])
    (small_disk / "filler").unlink()
    assert ended.status == 1, ended.errors[-3000:]
    assert re.search("No space left on device|Make room", ended.errors)
    assert "Traceback" not in ended.errors
    assert outliving(ended.processes) == []
    resumed = run_with_faults(config, [], "--resume")
    assert resumed.status == 0, resumed.errors[-3000:]
    assert [row["step"] for row in read_steps(run)] == [1, 2, 3, 4]
    assert len(read_rollouts(run)) == 4 * 32


# --- services ---


class Endpoint(BaseHTTPRequestHandler):
    """Scores conversations by their lengths; every second request fails, each time in another way."""

    requests = itertools.count()
    SLOW_S = 8.0  # longer than reward_model.timeout_s

    def do_POST(self) -> None:
        conversations = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["conversations"]
        scores = [len(conversation[-1]["content"]) for conversation in conversations]
        number = next(self.requests)
        match number % 8:
            case 1:
                self.send_error(500)
            case 3:
                self.answer("not JSON")
            case 5:
                self.answer("", announced=100)
            case 7:
                time.sleep(self.SLOW_S)
            case _:
                self.answer(json.dumps({"scores": scores}))

    def answer(self, text: str, announced: int = 0) -> None:
        self.send_response(200)
        if announced:
            self.send_header("Content-Length", str(announced))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


class Refusing(Endpoint):
    """Answers everything with an error."""

    def do_GET(self) -> None:
        self.send_error(500)

    def do_POST(self) -> None:
        self.send_error(500)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(100)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def serve(handler: type[BaseHTTPRequestHandler], port: int) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_services_that_fail_half_of_the_time_or_never_answer_cost_retries_and_those_that_are_gone_one_message(
    tiny_model_dir: Path, tmp_path: Path, silent_server: str
) -> None:
    port = free_port()
    config = write_config(
        tmp_path, tiny_model_dir, run={"steps": 3}, data={"eval": None}, checkpoint={"every": 1},
        reward_model={"endpoint": f"http://127.0.0.1:{port}/score", "timeout_s": 5.0, "retries": 3},
        logging={"wandb": {"mode": "online"}},
    )  # fmt: skip
    run, key = tmp_path / "run", "0" * 40
    endpoint = serve(Endpoint, port)
    done = run_with_faults(config, [], WANDB_BASE_URL=silent_server, WANDB_API_KEY=key)
    endpoint.shutdown()
    endpoint.server_close()
    assert done.status == 0, done.errors[-3000:]
    assert f"{silent_server} does not take the run" in done.output
    assert next(Endpoint.requests) > 8
    assert all(row["reward_parts"]["reward_model"] is not None for row in read_rollouts(run))

    refusing = serve(Refusing, 0)
    url = f"http://127.0.0.1:{refusing.server_address[1]}"
    more = ["--resume", "run.steps=5", "reward_model.retries=1"]
    ended = run_with_faults(config, [], *more, WANDB_BASE_URL=url, WANDB_API_KEY=key)
    refusing.shutdown()
    refusing.server_close()
    assert ended.status == 1, ended.errors[-3000:]
    assert f"{url} does not take the run" in ended.output
    assert f"error: reward_model.endpoint=http://127.0.0.1:{port}/score: 2 tries failed, the last with " in ended.errors
    assert "See whether it runs; reward_model.timeout_s=5 bounds one request." in ended.errors
    assert "Traceback" not in ended.errors

    endpoint = serve(Endpoint, port)
    resumed = run_with_faults(config, [], "--resume", "run.steps=5")
    endpoint.shutdown()
    endpoint.server_close()
    assert resumed.status == 0, resumed.errors[-3000:]
    assert [row["step"] for row in read_steps(run)] == [1, 2, 3, 4, 5]
    assert all(key.encode() not in file.read_bytes() for file in run.rglob("*") if file.is_file())
