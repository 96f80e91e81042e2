"""The command and its driver: signals, statuses, a driver that is ended from outside, output that cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import WAIT_S, eventually, read_until

from rlhf.config.cli import RESUMABLE

pytestmark = pytest.mark.slow

# Arguments: a folder, and what each driver does, the last one for all that follow. `lost@4` saves step 4 first.
PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from rlhf.config import cli
from rlhf.run import supervisor
from rlhf.run.checkpoint_files import write_manifest

cli.SAME_SIGNAL_S = 60.0  # the second of two signals may come late
folder, acts = Path(sys.argv[1]), sys.argv[2:]

async def wait_for_a_signal():
    print("waiting", os.getpid(), flush=True)
    await asyncio.sleep(1000)

def on_signal(name, cancel):  # a second one ends the run before it is saved
    print("got", name, flush=True)
    asyncio.get_running_loop().call_later(1.0, lambda: (print("saved", flush=True), cancel()))

def main():
    number = len([*folder.glob("driver-*")])
    (folder / f"driver-{number}").touch()
    own_ray = not os.environ.get("RAY_ADDRESS")
    supervisor.tell_command(supervisor.Training(str(folder), own_ray, 2))
    print(f"driver {number} {'resumes' if supervisor.follows_lost_driver() else 'begins'}", flush=True)
    act, _, step = acts[min(number, len(acts) - 1)].partition("@")
    if step:
        checkpoint = folder / "checkpoints" / f"step-{int(step):06d}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        write_manifest(checkpoint, {})
    if act == "lost":
        os._exit(1)
    elif act == "refuse":
        raise ValueError("run.dir=x: no")
    elif act == "fail":
        raise RuntimeError("engine 0 is lost")
    elif act == "wait":
        cli.run_async(wait_for_a_signal(), on_signal=on_signal)
    elif act == "print":
        for number in range(5000):
            print(number, "\\u4f60\\u597d: a line of the log of a run that is worth more than its log")
        (folder / "printed").touch()

sys.exit(supervisor.supervise(main))
"""


def start(folder: Path, *acts: str, before: tuple[str, ...] = (), **options: object) -> subprocess.Popen[str]:
    """The program in a process group of its own."""
    command = [*before, sys.executable, "-c", PROGRAM, str(folder), *acts]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload,no-any-return]


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, output, errors


def driver_of(process: subprocess.Popen[str]) -> int:
    return int(read_until(process, "waiting").split()[-1])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("act", "status", "error"),
    [("end", 0, ""), ("refuse", 2, "error: run.dir=x: no\n"), ("fail", 1, "error: engine 0 is lost\n")],
)
def test_a_driver_that_ends_by_itself_is_not_followed_by_another(
    tmp_path: Path, act: str, status: int, error: str
) -> None:
    assert ended(start(tmp_path, f"{act}@4")) == (status, "driver 0 begins\n", error)


def test_a_driver_that_is_ended_without_a_message_is_followed_by_one_that_resumes(tmp_path: Path) -> None:
    status, output, _ = ended(start(tmp_path, "lost@4", "lost@6", "lost", "end"))
    assert status == 0
    lines = [line for line in output.splitlines() if line.startswith("driver")]
    assert lines == ["driver 0 begins", *(f"driver {number} resumes" for number in (1, 2, 3))]
    assert "Restart 2 of at most 2 (run.max_restarts) from the checkpoint of step 6." in output


def test_only_restarts_without_a_new_checkpoint_use_up_the_budget(tmp_path: Path) -> None:
    status, output, errors = ended(start(tmp_path, "lost@4", "lost@6", "lost"))
    assert status == 1
    assert output.count("resumes") == 3
    assert "the driver has ended without a message" in errors


def test_without_a_checkpoint_a_lost_driver_ends_the_run(tmp_path: Path) -> None:
    status, output, errors = ended(start(tmp_path, "lost"))
    assert (status, output) == (1, "driver 0 begins\n")
    assert "the driver has ended without a message" in errors


def test_on_a_cluster_that_the_run_joined_it_ends_with_the_status_that_launchers_resume_on(tmp_path: Path) -> None:
    process = start(tmp_path, "lost@4", env=os.environ | {"RAY_ADDRESS": "head:6379"})
    status, output, errors = ended(process)
    assert (status, output) == (RESUMABLE, "driver 0 begins\n")
    assert "go on with --resume" in errors


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize("to", ["command", "command and its group", "command and driver"])
def test_a_signal_counts_once_whichever_processes_get_it(tmp_path: Path, name: str, to: str) -> None:
    process, number = start(tmp_path, "wait"), signal.Signals[name]
    driver = driver_of(process)
    process.send_signal(number)
    if to == "command and its group":  # as `timeout` does
        os.killpg(process.pid, number)
    elif to == "command and driver":  # as `pkill -f` does
        os.kill(driver, number)
    status, output, errors = ended(process)
    assert (status, output) == (128 + number, f"got {name}\nsaved\n")
    assert errors == ("interrupted\n" if name == "SIGINT" else "terminated\n")


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_a_program_that_is_started_with_closed_output_runs(tmp_path: Path, closed: str) -> None:
    process = start(tmp_path, "end@4", before=("sh", "-c", f'exec "$@" {closed}', "sh"))
    assert process.wait(timeout=WAIT_S) == 0
    process.communicate()


def test_under_nohup_a_lost_terminal_is_nothing_to_the_run(tmp_path: Path) -> None:
    process = start(tmp_path, "wait", before=("nohup",))
    driver_of(process)
    os.killpg(process.pid, signal.SIGHUP)
    process.terminate()
    status, output, _ = ended(process)
    assert (status, output) == (128 + signal.SIGTERM, "got SIGTERM\nsaved\n")


def test_the_command_dies_as_its_driver_is_killed_and_the_driver_with_its_command(tmp_path: Path) -> None:
    process = start(tmp_path, "wait@4")
    os.kill(driver_of(process), signal.SIGKILL)
    assert ended(process)[0] == -signal.SIGKILL
    process = start(tmp_path, "wait")
    driver = driver_of(process)
    os.killpg(process.pid, signal.SIGKILL)
    assert ended(process)[0] == -signal.SIGKILL
    assert eventually(lambda: not is_alive(driver))


# --- output ---


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    process = start(tmp_path, "print")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.wait(WAIT_S) == 0
    assert (tmp_path / "printed").exists()
    assert errors == "warning: standard output: Broken pipe. The program goes on without it.\n"


def test_a_full_disk_behind_the_output_does_not_end_the_run(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        status, _, errors = ended(start(tmp_path, "print", stdout=full))
    assert (status, errors) == (
        0, "warning: standard output: No space left on device. The program goes on without it.\n"
    )  # fmt: skip
    with Path("/dev/full").open("w") as full:
        assert ended(start(tmp_path, "refuse", stdout=full, stderr=full))[0] == 2


def test_what_an_ascii_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    process = start(tmp_path, "print", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    status, output, errors = ended(process)
    assert (status, errors) == (0, "")
    assert "\n4999 \\u4f60\\u597d: a line" in output
