"""Launch scripts with stand-ins for ray, srun, scontrol and ssh: who ends when, with which status, and what is told."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ray_cluster import ray_folder
from waiting import STACK_WAIT_S, WAIT_S, eventually, free_port, read_until

from rlhf.cluster.node_report import differences
from rlhf.config.cli import RESUMABLE
from rlhf.run.folder import RunFolder
from rlhf.run.state import RunState

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
TOKEN = "5ecret" * 8
AWKWARD = ["run.dir=my runs/a b", 'model.path=it\'s "quoted" $HOME `x` \\', "reward=[{name: math}]", ""]

# Ray's commands: `ray start` is RAY_START, `ray job submit` takes a job or refuses it. With RAY_WAITS, the one dies
# and the other answers when the test says so (`Sandbox.go_on`).
RAY = """\
#!/usr/bin/env bash
printf '%s|%s|%s\\n' "$RAY_AUTH_MODE" "$RAY_AUTH_TOKEN" "$*" >>"$RECORD/ray"
case "$1 $2" in
  start*) exec "$PYTHON_OUTSIDE" "$RECORD/../bin/ray_start.py" "${@:2}" ;;
  "job submit")
    while [ "$1" != -- ]; do shift; done
    printf '%s\\0' "${@:2}" >"$RECORD/entrypoint"
    while [ -n "${RAY_WAITS:-}" ] && [ ! -e "$RECORD/ray.go" ]; do sleep 0.05; done
    [ -n "${JOB_IS_REFUSED:-}" ] || exit 0
    echo "RuntimeError: Request failed with status code 400: Job with submission_id job-1 already exists."
    exit 1 ;;
esac
"""
# A cluster is the folder gcs-PORT: its token, notes, and nodes with the process that each is. A node ends when it is
# told to, and when its head has ended, as Ray's nodes do.
RAY_START = """\
import os, socket, sys, time
from pathlib import Path
from ray._raylet import is_alive
flags = dict(flag.partition("=")[::2] for flag in sys.argv[1:])
port = flags.get("--port") or flags["--address"].rpartition(":")[2]
folder = Path(os.environ["RECORD"]) / f"gcs-{port}"
if "--head" in flags:
    listener = socket.create_server(("", int(port)))
    for name in ("notes", "nodes"):
        (folder / name).mkdir(parents=True)
    (folder / "token").write_text(os.environ["RAY_AUTH_TOKEN"])
own = folder / f"pid-of-{flags['--node-name']}"
own.write_text(str(os.getpid()))
own.rename(folder / "nodes" / flags["--node-name"])  # nobody reads it half written
print("Ray runtime started.", flush=True)
dies = folder.parent / "ray.go" if os.environ.get("RAY_WAITS") else folder / "never"
while not dies.exists() and is_alive(folder / "nodes/rank-0"):
    time.sleep(0.1)
sys.exit("the raylet fell over")
"""
RAY_EXCEPTIONS = """\
class RayError(Exception): pass
class AuthenticationError(RayError): pass
"""
RAYLET = """\
import os
from pathlib import Path
from types import SimpleNamespace
from ray.exceptions import AuthenticationError, RayError

def is_alive(node):
    try:
        return Path(f"/proc/{node.read_text()}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

class GcsClient:
    def __init__(self, address):
        self.folder = Path(os.environ["RECORD"]) / f"gcs-{address.rpartition(':')[2]}"
        self.notes()
    def notes(self):
        if not is_alive(self.folder / "nodes/rank-0"): raise RayError("Timed out while waiting for GCS")
        if (self.folder / "token").read_text() != os.environ["RAY_AUTH_TOKEN"]: raise AuthenticationError
        return self.folder / "notes"
    def internal_kv_get(self, key, space, timeout):
        note = self.notes() / key.decode()
        return note.read_bytes() if note.exists() else None
    def internal_kv_put(self, key, value, over, space, timeout):
        try:
            with open(self.notes() / key.decode(), "wb" if over else "xb") as file: file.write(value)
            return 1
        except FileExistsError:
            return 0
    def get_all_node_info(self, timeout):
        self.notes()
        nodes = (self.folder / "nodes").iterdir()
        return {n.name: SimpleNamespace(node_name=n.name, state=0 if is_alive(n) else 1) for n in nodes}
"""
PROGRAM = """\
import json, os, sys, time
with open(os.environ["RECORD"] + "/program", "a") as file:
    file.write(json.dumps({"arguments": sys.argv[1:], "address": os.environ["RAY_ADDRESS"],
                           "token": os.environ["RAY_AUTH_TOKEN"], "pid": os.getpid(),
                           "shown": [os.environ.get(name) for name in os.environ.get("SHOWS", "").split()]}) + "\\n")
print("the program speaks", flush=True)
end = time.monotonic() + float(os.environ.get("PROGRAM_SLEEPS", "0"))
while time.monotonic() < end and not os.path.exists(os.environ["RECORD"] + "/program.go"):
    time.sleep(0.05)
sys.exit(int(os.environ.get("PROGRAM_STATUS", "0")))
"""


@dataclass
class Sandbox:
    """A folder of stand-ins, what they recorded, and the processes that were started."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def add(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *command: str | Path, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=self.environment | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        self.started.append(process)
        return process

    def node(self, rank: int, nodes: int, port: int, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        flags = ["--rank", str(rank), "--nodes", str(nodes), "--head", "127.0.0.1", "--port", str(port)]
        more = ["--deadline", environment.pop("DEADLINE", str(WAIT_S)), "--module", "stand_in_program"]
        return self.start(LAUNCH / "ray_node_setup.sh", *flags, *more, *arguments, **environment)

    def other_version(self, name: str = "rlhf-trainer", version: str = "9.9.9") -> str:
        """A PYTHONPATH on which a package seems to be installed in another version."""
        folder = self.folder / f"{name}-{version}"
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nrlhf = rlhf.weights.transfer:register_with_vllm\n"
        )
        return f"{folder}:{self.environment['PYTHONPATH']}"

    def recorded(self, name: str) -> list[str]:
        path = self.folder / "record" / name
        return path.read_text().splitlines() if path.exists() else []

    def programs(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.recorded("program")]

    def wait_for(self, name: str) -> None:
        assert eventually(lambda: self.recorded(name)), f"{name} was not called"

    def go_on(self, name: str) -> None:
        """Let a stand-in that waits or sleeps end: `ray` or `program`."""
        (self.folder / f"record/{name}.go").touch()

    def write_checkpoint(self) -> None:
        """Step 4 of the run that `slurm` starts, as the program writes it."""
        run = RunFolder(self.folder / "the run", resume=False)
        run.finish_checkpoint(run.begin_checkpoint(4), RunState(step=4), keep=1)


def ending(*processes: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Exit statuses, and all that was printed."""
    outputs = [process.communicate(timeout=STACK_WAIT_S)[0] for process in processes]
    return [process.returncode for process in processes], "".join(outputs)


def is_alive(pid: object) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    for name in ("bin", "record", "python", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "python/stand_in_program.py").write_text(PROGRAM)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    environment = {
        **inherited,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "RECORD": str(tmp_path / "record"),
        "PYTHONPATH": f"{tmp_path}/python:{ROOT}",
        "PYTHON": sys.executable,
        "PYTHON_OUTSIDE": sys.executable,
        "RAY": str(tmp_path / "bin/ray"),
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_TMPDIR": str(tmp_path / "home"),
        "HOME": str(tmp_path / "home"),
    }
    sandbox = Sandbox(tmp_path, environment)
    sandbox.add("ray", RAY)
    sandbox.add("ray_start.py", RAY_START)
    package = {"__init__": "", "exceptions": RAY_EXCEPTIONS, "_raylet": RAYLET, "job_submission": FAKE_JOB_CLIENT}
    (tmp_path / "python/ray").mkdir()
    for name, text in package.items():
        (tmp_path / f"python/ray/{name}.py").write_text(text)
    yield sandbox
    for process in sandbox.started:
        if process.poll() is None:
            process.kill()
            process.communicate()


# --- ray_node_setup.sh ---


def test_every_node_ends_with_the_programs_status_and_the_program_gets_its_arguments_unharmed(sandbox: Sandbox) -> None:
    port = free_port()
    arguments = ["--", "--config", "a b.yaml", *AWKWARD]
    nodes = [sandbox.node(rank, 3, port, *arguments, PROGRAM_STATUS="5") for rank in (2, 0, 1)]
    statuses, output = ending(*nodes)
    assert statuses == [5, 5, 5], output
    (program,) = sandbox.programs()
    assert program["arguments"] == arguments[1:]
    assert program["address"] == f"127.0.0.1:{port}"
    assert output.count("the program speaks") == 1


def test_all_nodes_have_one_token_and_nothing_prints_it(sandbox: Sandbox) -> None:
    port = free_port()
    _, output = ending(*(sandbox.node(rank, 3, port) for rank in range(3)))
    starts = [line.split("|") for line in sandbox.recorded("ray")]
    assert [(mode, token) for mode, token, _ in starts] == [("token", TOKEN)] * 3
    assert [program["token"] for program in sandbox.programs()] == [TOKEN]
    assert TOKEN not in output
    assert not any(TOKEN in arguments for _, _, arguments in starts)


def test_the_head_makes_a_token_that_only_its_user_reads_and_the_others_take_it(sandbox: Sandbox) -> None:
    del sandbox.environment["RAY_AUTH_TOKEN"]
    port = free_port()
    worker = sandbox.node(1, 2, port)
    statuses, output = ending(sandbox.node(0, 2, port), worker)
    path = sandbox.folder / "home/.ray/auth_token"
    assert statuses == [0, 0], output
    assert path.stat().st_mode & 0o777 == 0o600
    assert {line.split("|")[1] for line in sandbox.recorded("ray")} == {path.read_text()}
    assert path.read_text() not in output


def test_a_worker_whose_ray_dies_ends_the_run_and_is_named(sandbox: Sandbox) -> None:
    port = free_port()
    head = sandbox.node(0, 2, port, PROGRAM_SLEEPS="1000")
    worker = sandbox.node(1, 2, port, RAY_WAITS="1")
    sandbox.wait_for("program")
    sandbox.go_on("ray")
    statuses, output = ending(head, worker)
    assert statuses == [1, 1]
    assert "(rank 1)" in output.partition("Ray's logs")[0]  # the head says it first: from Ray, or from the worker
    assert "the raylet fell over" in output
    assert not any(is_alive(program["pid"]) for program in sandbox.programs())


def test_a_worker_that_is_killed_ends_the_run_and_is_named(sandbox: Sandbox) -> None:
    port = free_port()
    head, worker = sandbox.node(0, 2, port, PROGRAM_SLEEPS="1000"), sandbox.node(1, 2, port)
    sandbox.wait_for("program")
    worker.kill()
    statuses, output = ending(head)
    assert statuses == [1]
    assert "(rank 1) is gone" in output
    assert not is_alive(sandbox.programs()[0]["pid"])


def test_workers_end_when_the_head_is_killed_and_so_does_the_program(sandbox: Sandbox) -> None:
    port = free_port()
    head, worker = sandbox.node(0, 2, port, PROGRAM_SLEEPS="1000"), sandbox.node(1, 2, port)
    sandbox.wait_for("program")
    head.kill()
    head.communicate()
    statuses, output = ending(worker)
    assert statuses == [1]
    assert "Ray ended on this node" in output
    assert eventually(lambda: not is_alive(sandbox.programs()[0]["pid"]))


@pytest.mark.parametrize(("how", "status"), [("TERM", 143), ("INT", 130), ("stdin", 129)])
def test_a_signal_or_the_end_of_stdin_ends_everything(sandbox: Sandbox, how: str, status: int) -> None:
    port = free_port()
    flags = ["--end-with-stdin"] if how == "stdin" else []
    head = sandbox.node(0, 2, port, *flags, PROGRAM_SLEEPS="1000")
    worker = sandbox.node(1, 2, port)
    sandbox.wait_for("program")
    if how == "stdin":
        assert head.stdin is not None
        head.stdin.close()
        head.stdin = None
    else:
        head.send_signal(getattr(signal, f"SIG{how}"))
    statuses, output = ending(head, worker)
    assert statuses == [status, status], output
    assert not is_alive(sandbox.programs()[0]["pid"])


def test_a_node_with_another_token_is_refused_and_told_why(sandbox: Sandbox) -> None:
    port = free_port()
    head = sandbox.node(0, 2, port)
    statuses, output = ending(sandbox.node(1, 2, port, RAY_AUTH_TOKEN="another"))
    assert statuses == [2]
    assert "refused this node: it has another Ray token" in output
    head.terminate()
    assert ending(head)[0] == [143]


def test_a_head_names_who_did_not_come_in_time(sandbox: Sandbox) -> None:
    statuses, output = ending(sandbox.node(0, 3, free_port(), DEADLINE="10"))
    assert statuses == [1]
    assert "missing: rank 1, rank 2" in output


def test_a_node_that_cannot_start_ray_ends_the_run_at_once(sandbox: Sandbox) -> None:
    port = free_port()
    statuses, output = ending(sandbox.node(0, 2, port), sandbox.node(1, 2, port, RAY="/bin/false"))
    assert statuses == [1, 1]
    assert f"node {socket.gethostname()} (rank 1): Ray ended on this node" in output


def test_a_port_that_is_taken_ends_the_head_with_what_ray_says(sandbox: Sandbox) -> None:
    with socket.create_server(("", free_port())) as other:
        statuses, output = ending(sandbox.node(0, 2, other.getsockname()[1]))
    assert statuses == [1]
    assert "Address already in use" in output


def test_two_nodes_of_one_rank_are_told_apart(sandbox: Sandbox) -> None:
    port = free_port()
    head, *twins = sandbox.node(0, 3, port), sandbox.node(1, 3, port), sandbox.node(1, 3, port)
    assert eventually(lambda: any(twin.poll() is not None for twin in twins)), "nobody was refused"
    refused, accepted = sorted(twins, key=lambda twin: twin.poll() is None)
    statuses, output = ending(refused)
    assert statuses == [2]
    assert f"--rank=1: taken by {socket.gethostname()}, process " in output
    assert eventually(lambda: list(sandbox.folder.glob("record/gcs-*/nodes/rank-1"))), "the other one did not join"
    head.terminate()
    assert ending(head, accepted)[0] == [143, 143]


def test_a_node_with_another_number_of_nodes_than_the_head_is_refused(sandbox: Sandbox) -> None:
    port = free_port()
    head, other = sandbox.node(0, 2, port), sandbox.node(3, 4, port)
    statuses, output = ending(other)
    assert statuses == [2]
    assert re.search(r"--nodes=4: .*--nodes=2\b", output)
    head.terminate()
    assert ending(head)[0] == [143]


def test_one_node_needs_no_flags(sandbox: Sandbox) -> None:
    head = sandbox.start(
        LAUNCH / "ray_node_setup.sh", "--port", str(free_port()), "--module", "stand_in_program", "--config", "x"
    )
    statuses, output = ending(head)
    assert statuses == [0], output
    assert sandbox.programs()[0]["arguments"] == ["--config", "x"]


def test_what_a_node_lacks_or_has_otherwise_is_one_line_each() -> None:
    whole = {"node": "a", "rlhf": "1", "ray": "2.60.0", "vLLM plug-in": "installed", "source of rlhf": "12"}
    copied = whole | {"node": "b", "rlhf": "missing", "vLLM plug-in": "missing"}
    edited = whole | {"node": "c", "source of rlhf": "34"}
    assert differences([whole, dict(whole)]) == []
    no_rlhf, no_plugin, other_source = differences([whole, copied, edited])
    assert no_rlhf.startswith("node b: rlhf is not installed")
    assert no_plugin.startswith("node b: vLLM plug-in is not installed")
    assert re.match(r"node c: source of rlhf is 34\b.*\b12 on a\b", other_source)


# --- Slurm ---

SRUN = """\
#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$RECORD/srun"
trap 'kill -TERM $(jobs -p) 2>/dev/null; wait' TERM
while [[ $1 == --* ]]; do
  [[ $1 != --ntasks=* ]] || tasks=${1#*=}
  [[ $1 != --container-image=* ]] || PATH=${1#*=}:$PATH
  shift
done
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@" & done
status=0
for pid in $(jobs -p); do wait "$pid" || { s=$?; [ $s -le $status ] || status=$s; }; done
exit ${SRUN_STATUS:-$status}
"""
SCONTROL = """\
#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$RECORD/scontrol"
[ "$1" != show ] || printf '127.0.0.1\\nlocalhost\\n'
"""


def slurm(
    sandbox: Sandbox, *arguments: str, module: str = "stand_in_program", srun: str = SRUN, **environment: str
) -> subprocess.Popen[str]:
    sandbox.add("srun", srun)
    sandbox.add("scontrol", SCONTROL)
    sandbox.environment.pop("RAY_AUTH_TOKEN", None)
    job = {"SLURM_JOB_ID": str(free_port() - 20000), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2"}
    program = ["--module", module, "--deadline", str(WAIT_S), "--config", str(sandbox.folder / "run.yaml")]
    (sandbox.folder / "run.yaml").write_text(f"run: {{dir: '{sandbox.folder}/the run'}}\n")
    job["SLURM_SUBMIT_DIR"] = str(ROOT)
    return sandbox.start("bash", LAUNCH / "slurm.sbatch", *program, *arguments, **job, **environment)


def test_a_slurm_job_has_the_programs_status_even_where_srun_has_another(sandbox: Sandbox) -> None:
    statuses, output = ending(slurm(sandbox, *AWKWARD, PROGRAM_STATUS="3", SRUN_STATUS="137"))
    assert statuses == [3], output
    (program,) = sandbox.programs()
    assert program["arguments"] == ["--config", f"{sandbox.folder}/run.yaml", *AWKWARD]
    (called,) = sandbox.recorded("srun")
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1" in called
    tokens = {line.split("|")[1] for line in sandbox.recorded("ray")} | {program["token"]}
    (token,) = tokens
    assert len(str(token)) == 64
    assert str(token) not in output + called


def test_outside_of_a_job_the_script_submits_itself_with_what_the_config_asks_for(sandbox: Sandbox) -> None:
    sandbox.add("sbatch", '#!/usr/bin/env bash\nprintf "%s|" "$@" >>"$RECORD/sbatch"\n')
    config = ["--config", "configs/tulu3_8b_math.yaml", "run.dir=a b"]
    script = ["bash", LAUNCH / "slurm.sbatch", "--deadline", "9", *config]
    environment = {"SLURM_SUBMIT_DIR": str(ROOT), "SBATCH_ARGS": "--partition=gpu"}
    statuses, output = ending(sandbox.start(*script, **environment))
    assert statuses == [0], output
    (called,) = sandbox.recorded("sbatch")
    asked = ["--nodes=1", "--cpus-per-task=64", "--gpus-per-node=8", "--partition=gpu", "launch/slurm.sbatch"]
    assert called.strip("|\n").split("|") == [*asked, "--module", "rlhf.grpo", "--deadline", "9", "--", *config]
    statuses, output = ending(sandbox.start(*script, "run.stepz=3", **environment))
    assert statuses == [2]
    assert "run.stepz" in output


def test_a_requeued_job_resumes_where_there_is_a_whole_checkpoint(sandbox: Sandbox) -> None:
    sandbox.write_checkpoint()
    (sandbox.folder / "the run/checkpoints/step-000006.partial").mkdir()
    statuses, _ = ending(slurm(sandbox, SLURM_RESTART_COUNT="1"))
    assert statuses == [0]
    assert "--resume" in sandbox.programs()[0]["arguments"]  # type: ignore[operator]


def test_a_requeued_job_without_a_checkpoint_begins_anew_and_keeps_what_was_there(sandbox: Sandbox) -> None:
    (sandbox.folder / "the run/checkpoints/step-000002.partial").mkdir(parents=True)
    statuses, output = ending(slurm(sandbox, SLURM_RESTART_COUNT="1"))
    assert statuses == [0]
    assert "--resume" not in sandbox.programs()[0]["arguments"]  # type: ignore[operator]
    assert (sandbox.folder / "the run.interrupted-1/checkpoints/step-000002.partial").exists()
    assert "beginning anew" in output


def in_a_container(sandbox: Sandbox) -> dict[str, str]:
    """An interpreter that is found inside of the container alone."""
    image = sandbox.folder / "image"
    image.mkdir()
    (image / "python-inside").write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    (image / "python-inside").chmod(0o755)
    return {"PYTHON": "python-inside", "SRUN_ARGS": f"--container-image={image}"}


def test_a_requeued_job_in_a_container_resumes_and_its_status_comes_out(sandbox: Sandbox) -> None:
    sandbox.write_checkpoint()
    job = slurm(sandbox, SLURM_RESTART_COUNT="1", PROGRAM_STATUS="3", **in_a_container(sandbox))
    statuses, output = ending(job)
    assert statuses == [3], output
    assert "--resume" in sandbox.programs()[0]["arguments"]  # type: ignore[operator]
    status_file = Path(sandbox.recorded("srun")[-1].partition("--status-file ")[2].split()[0])
    assert status_file.is_relative_to(ROOT / "runs")  # with the checkout, it is there inside and outside
    assert not status_file.parent.exists()


def test_a_requeued_job_that_does_not_train_leaves_the_run_folder_alone(sandbox: Sandbox) -> None:
    (sandbox.folder / "the run/checkpoints/step-000002.partial").mkdir(parents=True)
    only_noted = '#!/usr/bin/env bash\nprintf "%s\\n" "$*" >>"$RECORD/srun"\n'
    statuses, output = ending(slurm(sandbox, module="rlhf.doctor", srun=only_noted, SLURM_RESTART_COUNT="1"))
    assert statuses == [0], output
    (called,) = sandbox.recorded("srun")
    assert "--module rlhf.doctor" in called
    assert "--resume" not in called
    assert (sandbox.folder / "the run/checkpoints/step-000002.partial").exists()


def test_the_first_start_of_a_job_does_not_resume(sandbox: Sandbox) -> None:
    sandbox.write_checkpoint()
    ending(slurm(sandbox))
    assert "--resume" not in sandbox.programs()[0]["arguments"]  # type: ignore[operator]


@pytest.mark.parametrize("near_limit", [True, False], ids=["time limit", "ray has ended"])
def test_a_job_that_can_go_on_from_a_new_checkpoint_requeues_itself(sandbox: Sandbox, near_limit: bool) -> None:
    job = slurm(sandbox, PROGRAM_SLEEPS="1000", PROGRAM_STATUS=str(RESUMABLE))
    sandbox.wait_for("program")
    sandbox.write_checkpoint()
    if near_limit:
        job.send_signal(signal.SIGUSR1)
    else:
        sandbox.go_on("program")
    assert ending(job)[0] == [143 if near_limit else RESUMABLE]
    assert sandbox.recorded("scontrol")[-1].startswith("requeue ")
    assert not is_alive(sandbox.programs()[0]["pid"])


@pytest.mark.parametrize("config_is_gone", [False, True])
def test_near_the_time_limit_a_job_without_a_new_checkpoint_goes_on_and_says_why(
    sandbox: Sandbox, config_is_gone: bool
) -> None:
    job = slurm(sandbox, PROGRAM_SLEEPS="1000", PROGRAM_STATUS=str(RESUMABLE))
    sandbox.wait_for("program")
    if config_is_gone:
        (sandbox.folder / "run.yaml").unlink()
    job.send_signal(signal.SIGUSR1)
    output = read_until(job, "not requeueing")
    assert ("there is no such file" if config_is_gone else "no checkpoint since the start") in output
    sandbox.go_on("program")  # it ends as a run does whose Ray has ended, and there is no checkpoint either
    assert ending(job)[0] == [RESUMABLE]
    assert not any(line.startswith("requeue") for line in sandbox.recorded("scontrol"))


def test_a_cancelled_slurm_job_leaves_no_program(sandbox: Sandbox) -> None:
    job = slurm(sandbox, PROGRAM_SLEEPS="1000")
    sandbox.wait_for("program")
    job.terminate()
    assert ending(job)[0] == [143]
    assert not is_alive(sandbox.programs()[0]["pid"])


# --- ssh ---

SSH = """\
#!/usr/bin/env bash
while [ "$1" = -o ]; do shift 2; done
printf '%s|%s\\n' "$1" "$2" >>"$RECORD/ssh"
[ "$1" != unreachable ] || { sleep 0.3; echo "ssh: connect to host $1: refused" >&2; exit 255; }
exec sh -c "$2"
"""


def over_ssh(sandbox: Sandbox, hosts: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    sandbox.add("ssh", SSH)
    sandbox.environment.pop("RAY_AUTH_TOKEN", None)
    (sandbox.folder / "hosts").write_text(hosts)
    flags = ["--hosts", str(sandbox.folder / "hosts"), "--port", str(free_port()), "--module", "stand_in_program"]
    return sandbox.start(LAUNCH / "ssh_cluster.sh", *flags, *arguments, **environment)


def test_ssh_takes_arguments_and_a_token_to_every_machine_and_brings_the_status_back(sandbox: Sandbox) -> None:
    hosts = "# the head first\nme@127.0.0.1   # here\n\nlocalhost\n"
    statuses, output = ending(over_ssh(sandbox, hosts, *AWKWARD, PROGRAM_STATUS="7"))
    assert statuses == [7], output
    (program,) = sandbox.programs()
    assert program["arguments"] == AWKWARD
    assert [line.split("|")[0] for line in sandbox.recorded("ssh")] in (
        ["me@127.0.0.1", "localhost"],
        ["localhost", "me@127.0.0.1"],
    )
    (token,) = {line.split("|")[1] for line in sandbox.recorded("ray")}
    assert len(token) == 64
    assert token not in output + "".join(sandbox.recorded("ssh"))


def test_ssh_sets_variables_on_every_machine_without_a_command_line_that_shows_them(sandbox: Sandbox) -> None:
    (sandbox.folder / "secrets.env").write_text(
        "# of wandb\nWANDB_API_KEY=from the file\nexport SEEN_B='it''s $HOME'\n"
    )
    flags = ["--env-file", str(sandbox.folder / "secrets.env"), "--env", "SEEN_A=a b=c", "--env", "SEEN_C"]
    environment = {"SEEN_C": "as here", "SHOWS": "SEEN_A SEEN_B SEEN_C WANDB_API_KEY"}
    statuses, output = ending(over_ssh(sandbox, "127.0.0.1\n", *flags, *AWKWARD, **environment))
    assert statuses == [0], output
    (program,) = sandbox.programs()
    assert program["arguments"] == AWKWARD
    assert program["shown"] == ["a b=c", "'it''s $HOME'", "as here", "from the file"]
    assert "from the file" not in output + "".join(sandbox.recorded("ssh"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env", "NOT_SET_HERE"], "--env=NOT_SET_HERE: write NAME=VALUE"),
        (["--env-file", "missing.env"], "--env-file=missing.env: No such file"),
        (["--env", "TWO=a\nb"], "--env=TWO: its value has several lines"),
    ],
)
def test_a_variable_that_cannot_be_set_is_named_before_anything_starts(
    sandbox: Sandbox, flags: list[str], message: str
) -> None:
    statuses, output = ending(over_ssh(sandbox, "127.0.0.1\n", *flags))
    assert statuses == [2]
    assert message in output
    assert not (sandbox.folder / "record/ssh").exists()


def test_a_machine_that_ssh_does_not_reach_ends_the_run(sandbox: Sandbox) -> None:
    statuses, output = ending(over_ssh(sandbox, "127.0.0.1\nunreachable\n", HEAD_NOTICES_S="1"))
    assert statuses == [255]
    assert "connect to host unreachable: refused" in output
    assert "ended with status 255" in output
    assert sandbox.programs() == []


@pytest.mark.parametrize("how", ["TERM", "KILL"])
def test_when_the_ssh_script_ends_so_does_everything_on_the_machines(sandbox: Sandbox, how: str) -> None:
    script = over_ssh(sandbox, "127.0.0.1\nlocalhost\n", PROGRAM_SLEEPS="1000")
    sandbox.wait_for("program")
    script.send_signal(getattr(signal, f"SIG{how}"))
    statuses, _ = ending(script)
    assert statuses == [143 if how == "TERM" else -9]
    assert not is_alive(sandbox.programs()[0]["pid"])


# --- submit ---

# JOB is a list of what happens one after another: a status, or [what the log shows so far, how the stream ends].
FAKE_JOB_CLIENT = """\
import asyncio, json, os
STORY = json.loads(os.environ["JOB"])
class JobSubmissionClient:
    def __init__(self, address): pass
    async def tail_job_logs(self, id):
        text, ending = STORY.pop(0)
        yield text[:5]
        if text[5:]: yield text[5:]
        open(os.environ["RECORD"] + "/log", "a").write("read\\n")
        if ending == "breaks": raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")
        if ending == "hangs": await asyncio.sleep(1000)
    def get_job_info(self, id):
        class Status(str):
            def is_terminal(self): return self in ("FAILED", "STOPPED", "SUCCEEDED")
        if STORY[0] == "silence": raise ConnectionError("nobody there")
        class Info: status, message = Status(STORY.pop(0)), "why"
        Info.driver_exit_code = {"SUCCEEDED": 0, "FAILED": 2}.get(Info.status)
        return Info
"""


def submit(sandbox: Sandbox, *arguments: str, job: object = (), **environment: str) -> subprocess.Popen[str]:
    flags = ["--id", "job-1", "--nodes", "2"]
    return sandbox.start(LAUNCH / "submit.sh", *flags, *arguments, JOB=json.dumps(job), **environment)


def stops(sandbox: Sandbox) -> list[str]:
    return [line.split("|")[2] for line in sandbox.recorded("ray") if "job stop" in line]


def test_a_job_gets_the_arguments_and_its_exit_status_comes_back(sandbox: Sandbox) -> None:
    arguments = ["--config", "configs/math.yaml", *AWKWARD]
    statuses, output = ending(submit(sandbox, *arguments, job=[["it ran\n", "closed"], "FAILED"]))
    assert statuses == [2], output
    (mode, token, called) = sandbox.recorded("ray")[0].split("|")
    assert (mode, token) == ("token", TOKEN)
    assert f"--submission-id job-1 --no-wait --working-dir {ROOT}" in called
    entry = (sandbox.folder / "record/entrypoint").read_text().split("\0")[:-1]
    flags = ["--nodes", "2", "--module", "rlhf.grpo", "--deadline", "600.0"]
    assert entry == ["python", "launch/nodes.py", "run", *flags, "--", *arguments]
    assert stops(sandbox) == []
    assert "it ran\n" in output
    assert TOKEN not in output


@pytest.mark.parametrize(("state", "status"), [("SUCCEEDED", 0), ("FAILED", 2), ("STOPPED", 143)])
def test_only_a_job_that_succeeded_gives_0(sandbox: Sandbox, state: str, status: int) -> None:
    assert ending(submit(sandbox, "--config", "x", job=[["", "closed"], state]))[0] == [status]
    assert stops(sandbox) == []


@pytest.mark.parametrize("how", ["breaks", "closed"])
def test_a_log_that_breaks_off_goes_on_where_it_was_and_the_job_with_it(sandbox: Sandbox, how: str) -> None:
    story = [["step 1\n", how], "RUNNING", ["step 1\nstep 2\n", how], "RUNNING", ["step 1\nstep 2\nend\n", how]]
    statuses, output = ending(submit(sandbox, "--config", "x", job=[*story, "SUCCEEDED"]))
    assert statuses == [0], output
    assert output == "step 1\nstep 2\nend\n"
    assert stops(sandbox) == []


def test_a_job_of_which_nothing_is_heard_any_more_is_left_alone(sandbox: Sandbox) -> None:
    statuses, output = ending(submit(sandbox, "--patience", "0", "--config", "x", job=[["", "breaks"], "silence"]))
    assert statuses == [1]
    assert "ray job status --address http://127.0.0.1:8265 job-1" in output


def test_an_id_that_another_job_has_is_refused_and_that_job_goes_on(sandbox: Sandbox) -> None:
    statuses, output = ending(submit(sandbox, "--config", "x", JOB_IS_REFUSED="1"))
    assert statuses == [1]
    assert "already exists" in output
    assert "Ray did not take job job-1" in output
    assert stops(sandbox) == []


def test_interrupting_the_log_stops_the_job(sandbox: Sandbox) -> None:
    job = submit(sandbox, "--config", "x", job=[["", "hangs"]])
    sandbox.wait_for("log")
    job.terminate()
    statuses, _ = ending(job)
    assert statuses == [143]
    assert stops(sandbox) == ["job stop --address http://127.0.0.1:8265 job-1"]


@pytest.mark.parametrize(("refused", "stopped"), [("", 1), ("1", 0)], ids=["taken", "refused"])
def test_interrupting_the_submission_stops_the_job_only_if_ray_took_it(
    sandbox: Sandbox, refused: str, stopped: int
) -> None:
    job = submit(sandbox, "--config", "x", RAY_WAITS="1", JOB_IS_REFUSED=refused)
    sandbox.wait_for("ray")
    job.terminate()
    sandbox.go_on("ray")
    statuses, _ = ending(job)
    assert statuses == [143]
    assert len(stops(sandbox)) == stopped


def test_a_job_that_is_not_waited_for_shows_its_id(sandbox: Sandbox) -> None:
    statuses, output = ending(submit(sandbox, "--no-wait", "--config", "x"))
    assert (statuses, output) == ([0], "job-1\n")
    assert stops(sandbox) == []


def test_without_a_token_the_submission_says_where_to_get_it(sandbox: Sandbox) -> None:
    del sandbox.environment["RAY_AUTH_TOKEN"]
    statuses, output = ending(submit(sandbox, "--config", "x"))
    assert statuses == [2]
    assert "copy the head's ~/.ray/auth_token here" in output


# --- a program on a cluster that is up ---


def on_cluster(sandbox: Sandbox, wanted: int, **environment: str) -> tuple[list[int], str]:
    """`nodes.py run` on a cluster of two nodes."""
    port = free_port()
    for rank, flag in enumerate((f"--port={port}", f"--address=127.0.0.1:{port}")):
        head = ["--head"] if rank == 0 else []
        sandbox.start(sandbox.folder / "bin/ray", "start", *head, flag, f"--node-name=rank-{rank}")
        node = sandbox.folder / f"record/gcs-{port}/nodes/rank-{rank}"
        assert eventually(node.exists)
    command = [sys.executable, LAUNCH / "nodes.py", "run", "--nodes", str(wanted), "--deadline", "1"]
    command += ["--module", "stand_in_program", "--", *AWKWARD]
    return ending(sandbox.start(*command, **({"RAY_ADDRESS": f"127.0.0.1:{port}"} | environment)))


def test_on_a_running_cluster_the_program_starts_when_all_nodes_are_there(sandbox: Sandbox) -> None:
    statuses, output = on_cluster(sandbox, 2, PROGRAM_STATUS="9")
    assert statuses == [9], output
    assert sandbox.programs()[0]["arguments"] == AWKWARD


def test_on_a_running_cluster_nothing_starts_while_a_node_is_absent(sandbox: Sandbox) -> None:
    statuses, output = on_cluster(sandbox, 3)
    assert statuses == [1]
    assert "2 of 3 nodes" in output
    assert sandbox.programs() == []


# --- all of them ---


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_explains_itself(script: Path) -> None:
    shown = subprocess.run(["bash", script, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--config FILE ... [section.key=value ...]" in shown
    assert "oken" in shown


@pytest.mark.private
def test_rays_commands_for_jobs_have_the_flags_that_we_use() -> None:
    from ray.dashboard.modules.job.cli import stop, submit

    flags = {option for parameter in submit.params for option in parameter.opts}
    assert flags >= {"--address", "--submission-id", "--working-dir", "--runtime-env-json", "--no-wait"}
    assert "--address" in {option for parameter in stop.params for option in parameter.opts}


# --- with a real Ray ---

# It says how many nodes are alive, and goes on until it is ended, or until there is a file GO.
JOINS_RAY = """\
import logging, os, ray, sys, time
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
alive = sum(node["Alive"] for node in ray.nodes())
with open(os.environ["RECORD"] + "/program", "a") as file:
    file.write(f'{{"pid": {os.getpid()}, "alive": {alive}}}\\n')
while not os.path.exists(os.environ["RECORD"] + "/program.go"):
    time.sleep(0.1)
ray.shutdown()
sys.exit(6)
"""


@pytest.fixture
def real(sandbox: Sandbox) -> Iterator[Sandbox]:
    """Ray itself, in a folder below which no process is left when the test has ended."""
    del sandbox.environment["RAY"]
    shutil.rmtree(sandbox.folder / "python/ray")
    (sandbox.folder / "python/stand_in_program.py").write_text(JOINS_RAY)
    with ray_folder() as folder:
        sandbox.environment |= {"RAY_TMPDIR": folder, "RAY_ARGS": "--num-cpus=1"}
        yield sandbox


def left_behind(sandbox: Sandbox) -> list[str]:
    """Processes of Ray's that name the test's folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [command for command in commands if sandbox.environment["RAY_TMPDIR"] in command]


def two_real_nodes(sandbox: Sandbox, port: int) -> list[subprocess.Popen[str]]:
    nodes = [sandbox.node(rank, 2, port, DEADLINE=str(STACK_WAIT_S)) for rank in (0, 1)]
    eventually(lambda: sandbox.recorded("program") or any(node.poll() is not None for node in nodes), STACK_WAIT_S)
    assert sandbox.recorded("program"), ending(*nodes)
    assert sandbox.programs()[0]["alive"] == 2
    return nodes


@pytest.mark.private
@pytest.mark.stack
def test_real_nodes_end_with_the_programs_status_and_a_stranger_is_refused(real: Sandbox) -> None:
    port = free_port()
    nodes = two_real_nodes(real, port)
    statuses, output = ending(real.node(2, 3, port, RAY_AUTH_TOKEN="f" * 48))
    assert statuses == [2], output
    assert "refused this node: it has another Ray token" in output
    real.go_on("program")
    statuses, output = ending(*nodes)
    assert statuses == [6, 6], output
    assert left_behind(real) == []


@pytest.mark.faults
@pytest.mark.stack
@pytest.mark.parametrize("who", ["head", "worker"])
def test_a_real_node_that_is_killed_ends_the_other_and_leaves_nothing(real: Sandbox, who: str) -> None:
    """A worker hears of its head's end from Ray, which gives up after a minute without it."""
    head, worker = two_real_nodes(real, free_port())
    killed, other = (head, worker) if who == "head" else (worker, head)
    killed.kill()
    killed.communicate()
    statuses, output = ending(other)
    assert statuses == [1], output
    assert "Ray ended on this node" in output if who == "head" else "(rank 1)" in output
    # what the killed one started is ended by the system, and takes its time
    assert eventually(lambda: not is_alive(real.programs()[0]["pid"]) and not left_behind(real)), left_behind(real)


@pytest.mark.faults
@pytest.mark.stack
def test_a_signal_ends_real_nodes_and_no_other_ray(real: Sandbox, tmp_path: Path) -> None:
    with ray_folder() as folder:
        (tmp_path / "other").mkdir()
        apart = {"RAY_TMPDIR": folder, "RECORD": str(tmp_path / "other"), "DEADLINE": str(STACK_WAIT_S)}
        other = real.node(0, 1, free_port(), **apart)
        head, worker = two_real_nodes(real, free_port())
        head.terminate()
        statuses, output = ending(head, worker)
        assert statuses == [143, 143], output
        assert left_behind(real) == []
        (tmp_path / "other/program.go").touch()
        statuses, output = ending(other)
    assert statuses == [6], output
