"""The sweep: which runs it starts, what it does with finished, interrupted and failed ones, and its table."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import all_processes
from waiting import WAIT_S, eventually

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "launch"))
import resume  # noqa: E402
import sweep  # noqa: E402

sys.path.remove(str(ROOT / "launch"))

# Writes what the real program does: an accuracy that grows with k, and a checkpoint before it fails or is ended.
PROGRAM = """\
import json, os, pathlib, signal, sys, time
def end(*_):
    (folder / "ended").touch()
    while len(list(folder.parent.glob("*/ended"))) < int(os.environ.get("END_TOGETHER", "1")): time.sleep(0.05)
    (folder / "ended by itself").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
values = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a and not a.startswith("-"))
folder = pathlib.Path(values["run.dir"])
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ["RAY_AUTH_TOKEN"]]) + "\\n")
(folder / "checkpoints" / "step-000001").mkdir(parents=True, exist_ok=True)
from rlhf.run.checkpoint_files import write_manifest
write_manifest(folder / "checkpoints" / "step-000001", {})
print("working on", folder.name, flush=True)
time.sleep(float(os.environ.get("PROGRAM_SLEEPS", "0")))
if values["algo.kl_estimator"] == os.environ.get("FAILS"):
    sys.exit("error: the learner fell over")
k = int(values["algo.kl_estimator"][1])
summary = {"evaluation_before": {"eval/test/avg@1": 0.3}, "evaluation_after": {"eval/test/avg@1": 0.3 + k / 10},
           "updates_taken": 4, "updates_skipped": 0, "seconds": {"update": 1.5}}
(folder / "summary.json").write_text(json.dumps(summary))
steps = [{"step": 1, "time/step": 2.0, "policy/kl_k3": 0.5}, {"step": 2, "time/step": 2.0, "policy/kl_k3": k / 4}]
lines = [json.dumps(row) for row in [*steps, {"step": 2, "eval/test/avg@1": 0.4}]]
(folder / "metrics.jsonl").write_text("\\n".join(lines))
"""


class Sweep:
    def __init__(self, folder: Path) -> None:
        self.output, self.record = folder / "scan", folder / "record"
        (folder / "stand_in_program.py").write_text(PROGRAM)
        self.environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "RECORD": str(self.record)}
        self.environment.pop("RAY_AUTH_TOKEN", None)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        axes = ["--grid", "algo.kl_estimator=k1,k2", "--grid", "algo.kl_coef=0.01,0.1"]
        command = [sys.executable, str(ROOT / "launch/sweep.py"), "--output", str(self.output), *axes]
        command += ["--module", "stand_in_program", "--config", "a b.yaml", *arguments]
        return subprocess.Popen(
            command, env=self.environment | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **environment)
        output, errors = process.communicate(timeout=WAIT_S)
        return process.returncode, output, errors

    def calls(self) -> list[list[str]]:
        return [json.loads(line)[0] for line in self.record.read_text().splitlines()] if self.record.exists() else []

    def tokens(self) -> set[str]:
        return {json.loads(line)[1] for line in self.record.read_text().splitlines()}


@pytest.fixture
def scan(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def test_every_cell_is_a_line_and_a_row_of_the_table(scan: Sweep) -> None:
    status, output, errors = scan.run("run.seed=3", "reward=[{name: math}]")
    assert status == 0, errors
    lines = output.splitlines()
    assert [line.rpartition(",")[0] for line in lines[:4]] == [
        "[1/4] kl_estimator=k1,kl_coef=0.01: done",
        "[2/4] kl_estimator=k1,kl_coef=0.1: done",
        "[3/4] kl_estimator=k2,kl_coef=0.01: done",
        "[4/4] kl_estimator=k2,kl_coef=0.1: done",
    ]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]]
    assert table[0][:4] == [
        "algo.kl_estimator",
        "algo.kl_coef",
        "evaluation_before.eval/test/avg@1",
        "evaluation_after.eval/test/avg@1",
    ]
    assert table[2] == ["k1", "0.01", "0.3", "0.4", "4", "0"]
    assert table[5] == ["k2", "0.1", "0.3", "0.5", "4", "0"]
    assert (scan.output / "table.md").read_text() == "\n".join(lines[4:]) + "\n"
    first = scan.output / "kl_estimator=k1,kl_coef=0.01"
    assert scan.calls()[0] == [
        "--config",
        "a b.yaml",
        "run.seed=3",
        "reward=[{name: math}]",
        "algo.kl_estimator=k1",
        "algo.kl_coef=0.01",
        f"run.dir={first}",
    ]
    (token,) = scan.tokens()
    assert len(token) == 64
    assert token not in output + errors


def test_the_same_command_runs_only_what_is_missing_and_resumes_what_has_a_checkpoint(scan: Sweep) -> None:
    status, output, errors = scan.run(FAILS="k2")
    assert status == 1
    assert "kl_estimator=k2,kl_coef=0.1: failed with status 1" in output
    assert "the learner fell over" in errors
    assert "2 of 4 runs failed" in errors
    scan.record.unlink()
    status, output, _ = scan.run()
    assert status == 0
    assert output.count("has its result") == 2
    assert [("algo.kl_estimator=k2" in call, "--resume" in call) for call in scan.calls()] == [(True, True)] * 2


def test_runs_of_a_sweep_are_a_group_on_wandb() -> None:
    cell = sweep.Cell((("algo.kl_coef", "0.1"),), Path("runs/scan/kl_coef=0.1"))
    command = sweep.command(cell, "rlhf.ppo", ["logging.wandb.group=mine"])
    assert command[3:] == [
        "logging.wandb.group=scan", "logging.wandb.group=mine", "algo.kl_coef=0.1", f"run.dir={cell.folder}",
    ]  # fmt: skip
    assert not any("wandb" in part for part in sweep.command(cell, "rlhf.reward_model", []))


def test_a_dry_run_prints_commands_that_a_shell_reads_back_and_makes_nothing(scan: Sweep) -> None:
    status, output, _ = scan.run("--dry-run")
    assert status == 0
    commands = [shlex.split(line) for line in output.splitlines()]
    assert len(commands) == 4
    assert all(command[1:5] == ["-m", "stand_in_program", "--config", "a b.yaml"] for command in commands)
    assert not scan.output.exists()


def test_a_signal_ends_the_run_that_is_under_way(scan: Sweep) -> None:
    process = scan.start(PROGRAM_SLEEPS="1000")
    assert eventually(scan.calls)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 143
    assert len(scan.calls()) == 1
    assert not any(str(scan.output) in process.command for process in all_processes().values())


def test_runs_at_the_same_time_are_ended_at_the_same_time(scan: Sweep) -> None:
    process = scan.start("--jobs", "2", PROGRAM_SLEEPS="1000", END_TOGETHER="2")
    assert eventually(lambda: len(scan.calls()) == 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 143
    assert len(list(scan.output.glob("*/ended by itself"))) == 2  # each waits for the other's signal, else it is killed


def test_the_table_of_an_unfinished_scan_says_what_is_not_there(scan: Sweep) -> None:
    assert scan.run("--table")[1].count("| - ") == 8  # two columns of four runs
    scan.run(FAILS="k2")
    table = scan.run("--table", "--column", "policy/kl_k3")[1]
    assert [line.split("|")[3].strip() for line in table.splitlines()[2:]] == ["0.25", "0.25", "-", "-"]
    table = scan.run("--table", "--column", "seconds.*")[1]
    assert "seconds.update" in table
    assert table.count("1.5") == 2
    assert scan.run("--table")[0] == 0


def test_the_seeds_of_a_setting_are_one_row_with_their_mean_and_an_interval(tmp_path: Path) -> None:
    grid = sweep.cells([("algo.kl_coef", ["0.01", "0.1"]), ("run.seed", ["0", "1", "2"])], tmp_path)
    for cell, accuracy in zip(grid, (0.2, 0.4, 0.9, 0.5, 0.7), strict=False):  # the last cell has not finished
        cell.folder.mkdir()
        summary = {"evaluation_after": {"eval/test/avg@1": accuracy}, "updates_taken": 4}
        (cell.folder / "summary.json").write_text(json.dumps(summary))
    assert sweep.table(grid, ["evaluation_after.*", "updates_taken", "missing"]).splitlines() == [
        "| algo.kl_coef | seeds | evaluation_after.eval/test/avg@1 | updates_taken | missing |",
        "|---|---|---|---|---|",
        "| 0.01 | 3 | 0.5 (0.2 to 0.9) | 4 | - |",
        "| 0.1 | 2 of 3 | 0.6 (0.5 to 0.7) | 4 | - |",
        "",
        sweep.OVER_SEEDS,
    ]
    assert sweep.table(grid[:1], ["updates_taken"]).splitlines()[2] == "| 0.01 | 0 | 4 |"  # one seed is a row as before


def test_values_may_hold_commas_in_brackets_and_quotes() -> None:
    axis = sweep.parse_axis("learner.optimizer.betas=[0.9, 0.95],[0.9, 0.999]")
    assert axis == ("learner.optimizer.betas", ["[0.9, 0.95]", "[0.9, 0.999]"])
    assert sweep.parse_axis("a.b='x,y',z") == ("a.b", ["'x,y'", "z"])
    assert sweep.parse_axis("reward=[{name: math}],[]") == ("reward", ["[{name: math}]", "[]"])
    assert sweep.parse_axis("a.b=1.0e-6, k=v,null") == ("a.b", ["1.0e-6", "k=v", "null"])


@pytest.mark.parametrize("text", ["algo.kl_coef", "=1,2", "a.b=", "a.b=1,,2", "a.b=1,1"])
def test_an_axis_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="--grid"):
        sweep.parse_axis(text)


def test_keys_with_the_same_last_part_are_named_in_full(tmp_path: Path) -> None:
    axes = [("rollout.temperature", ["1"]), ("evaluation.temperature", ["0"])]
    (cell,) = sweep.cells(axes, tmp_path)
    assert cell.folder.name == "rollout.temperature=1,evaluation.temperature=0"
    with pytest.raises(ValueError, match="is given twice"):
        sweep.cells([("a.b", ["1"]), ("a.b", ["2"])], tmp_path)


def test_run_dir_is_found_as_the_program_finds_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: {dir: first}\nreward: [math]\n")
    (tmp_path / "b.yaml").write_text("run: {dir: second}\n")
    files = ["--config", str(tmp_path / "a.yaml"), f"--config={tmp_path}/b.yaml"]
    assert resume.run_dir(files) == Path("second")
    assert resume.run_dir(["run.dir=a b", *files, "reward.workers=2", "--resume"]) == Path("a b")
    with pytest.raises(ValueError, match=r"run\.dir=FOLDER"):
        resume.run_dir(["run.steps=1"])


def test_a_run_resumes_once_the_program_has_finished_a_checkpoint(tmp_path: Path) -> None:
    from rlhf.run.folder import RunFolder
    from rlhf.run.state import RunState

    folder = RunFolder(tmp_path / "run", resume=False)
    partial = folder.begin_checkpoint(2)
    folder.finish_checkpoint(partial, RunState(step=2), keep=1)
    assert resume.prepare(folder.path) == ["--resume"]
    folder.begin_checkpoint(4)
    assert resume.prepare(folder.path) == ["--resume"]
    arguments = [f"run.dir={tmp_path}/bare", f"checkpoint.mirror=file://{tmp_path}/run/checkpoints"]
    assert resume.prepare(resume.run_dir(arguments), resume.value_of("checkpoint.mirror", arguments)) == ["--resume"]
    assert resume.prepare(resume.run_dir(arguments), None) == []
