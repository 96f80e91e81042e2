"""Runs over several Ray nodes on this machine: hosts in network namespaces, a dying node, a job on a real dashboard.

A host is a network namespace with an address of its own, so that whatever crosses from one to the other takes the way
that it would take between machines. A node has one CPU, less than all parts reserve: they have to spread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from installed import seems_installed
from processes import below, outliving
from ray_cluster import ray_folder
from test_stack_grpo import read_steps, wait_for_step, write_config
from waiting import STACK_WAIT_S, eventually, free_port, read_until

from rlhf.quickstart import write_quickstart

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
DEVICE = "eth0"  # in both hosts, as on machines of one make
SPREAD = ["cluster.learners=2", "cluster.cpus_per_learner=0.75", "cluster.cpus_per_engine=0.25"]  # learner | learner
APART = ["cluster.learners=2", "cluster.cpus_per_learner=0.5", "cluster.cpus_per_engine=0.5"]  # learners | engine


@dataclass(frozen=True)
class Host:
    name: str
    address: str

    def start(self, *command: str | Path, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *map(str, command)],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        )  # fmt: skip


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two network namespaces with a cable between them."""
    allowed = os.geteuid() == 0 and shutil.which("ip") is not None
    if not allowed or subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no network namespaces")
    mark, net = f"{os.getpid()}", f"10.{os.getpid() % 200 + 20}.77"
    hosts = (Host(f"rlhf-a-{mark}", f"{net}.1"), Host(f"rlhf-b-{mark}", f"{net}.2"))
    try:
        for host in hosts:
            ip("netns", "add", host.name)
        ends = [part for host in hosts for part in ("name", DEVICE, "netns", host.name)]
        ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        for host, other in zip(hosts, reversed(hosts), strict=True):
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                ip("-n", host.name, "link", "set", device, "up")
            ip("-n", host.name, "route", "add", "default", "via", other.address)
        yield hosts
    finally:
        for host in hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", host.name)


def end(*processes: subprocess.Popen[str]) -> tuple[list[int], list[str]]:
    try:
        outputs = [process.communicate(timeout=STACK_WAIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


@pytest.fixture(scope="module")
def own_ray_folder() -> Iterator[None]:
    """What Ray writes below /tmp otherwise, sockets and logs, goes when the tests have ended."""
    with ray_folder() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.mark.usefixtures("own_ray_folder")
def test_two_hosts_train_together_and_end_with_the_programs_status(
    two_hosts: tuple[Host, Host], tiny_model_dir: Path, tmp_path: Path
) -> None:
    """One learner on each host, in one DeepSpeed world; the engine takes weights from the other host or its own."""
    config = write_config(tmp_path, tiny_model_dir, run={"steps": 2}, logging={"wandb": {"mode": "disabled"}})
    network = {"GLOO_SOCKET_IFNAME": DEVICE, "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    flags = ["--nodes", "2", "--head", two_hosts[0].address, "--ray-args", "--num-cpus=1"]
    program = ["--config", str(config), *SPREAD]
    nodes = [
        host.start(LAUNCH / "ray_node_setup.sh", "--rank", str(rank), *flags, *program, **network)
        for rank, host in enumerate(two_hosts)
    ]
    statuses, outputs = end(*nodes)
    assert statuses == [0, 0], outputs
    assert f"Ray is up on 2 node(s), head {two_hosts[0].address}:6379; starting rlhf.grpo" in outputs[0]
    steps = read_steps(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["sync/canary_difference"] < 1e-4 for row in steps)


@pytest.mark.faults
@pytest.mark.usefixtures("own_ray_folder")
def test_a_node_with_another_version_is_named_before_any_actor_starts(tiny_model_dir: Path, tmp_path: Path) -> None:
    # transformers, not rlhf: of the package itself, the checkout's own metadata would be found first
    seems_installed(tmp_path / "other", "transformers", "9.9.9")
    config = write_config(tmp_path, tiny_model_dir, run={"steps": 2}, logging={"wandb": {"mode": "disabled"}})
    flags = ["--nodes", "2", "--head", "127.0.0.1", "--port", str(free_port()), "--ray-args", "--num-cpus=1"]
    environment = os.environ | {"RAY_AUTH_TOKEN": secrets.token_hex(16), "PYTHON": sys.executable}
    other = {"PYTHONPATH": f"{tmp_path}/other:{os.environ.get('PYTHONPATH', '')}"}
    nodes = [
        subprocess.Popen(
            [LAUNCH / "ray_node_setup.sh", "--rank", str(rank), *flags, "--config", str(config), *SPREAD],
            env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        )
        for rank, more in enumerate(({}, other))
    ]  # fmt: skip
    statuses, outputs = end(*nodes)
    assert statuses == [2, 2], outputs
    assert "these nodes have different package versions:" in outputs[0]
    assert f"): transformers is 9.9.9, but {version('transformers')} on " in outputs[0]
    assert "step 1/" not in outputs[0]


@pytest.fixture(scope="module")
def token(own_ray_folder: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
        monkeypatch.setenv("RAY_worker_niceness", "0")  # as the launch scripts do; at Ray's 15 neighbours starve them
        yield


@pytest.mark.faults
@pytest.mark.usefixtures("token")
def test_a_node_that_dies_in_the_middle_ends_the_run_with_one_message_and_the_doctor_names_it(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Whichever is seen first: that an actor is gone, that a connection broke, or that Ray calls the node dead."""
    script = Path(__file__).parents[1] / "ray_cluster.py"
    cluster = subprocess.Popen([sys.executable, script, "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    try:
        cluster_nodes = json.loads(cluster.stdout.readline())
        once = {"steps": 100000, "max_restarts": 0}
        config = write_config(tmp_path, tiny_model_dir, run=once, logging={"wandb": {"mode": "disabled"}})
        environment = os.environ | {"RAY_ADDRESS": cluster_nodes["address"]}
        program = subprocess.Popen(
            [sys.executable, "-m", "rlhf.grpo", "--config", config, *APART],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_for_step(tmp_path / "run", 1, program)
        print("kill 0", file=cluster.stdin, flush=True)
        assert cluster.stdout.readline() == "killed\n"
        # Asked at once: Ray lists the node as alive until it has missed five health checks.
        command = [sys.executable, "-m", "rlhf.check.doctor.nodes", cluster_nodes["address"], str(STACK_WAIT_S)]
        asked = subprocess.run(command, capture_output=True, text=True, check=True)
        answers = json.loads(asked.stdout.splitlines()[-1])
        (lost,) = [name for name, answer in answers.items() if "installed" not in answer]
        assert answers[lost].keys() == {"died"}, answers[lost]  # a `silent` node would fail the check of the nodes
        _, stderr = program.communicate(timeout=STACK_WAIT_S)
        assert program.returncode == 1, stderr[-3000:]
        (message,) = stderr.strip().splitlines()
        (dead, address), _ = cluster_nodes["nodes"]
        assert f", {dead[:8]})" in lost
        assert f" on node {address} ({dead[:8]}) is lost: " in message

        command = [sys.executable, "-m", "rlhf.doctor", "--config", str(config), *APART]
        examined = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert examined.returncode == 1
        failed = [line.split()[1] for line in examined.stdout.splitlines() if line.startswith("FAIL")]
        assert failed == ["start-up"], examined.stdout
        assert f", {dead[:8]}) died: " in examined.stdout  # a warning: other nodes are alive at its address
        assert "reserve 1.5 CPUs" in examined.stdout
    finally:
        cluster.communicate(timeout=STACK_WAIT_S)  # its input ends, and with it the cluster


PLAYS = """
import asyncio
import os
import uuid
from pathlib import Path

FOLDER, LOADED_IN = Path(__file__).parent, os.getpid()

async def pass_the_gate():
    \"\"\"Note the node, by the process that all of its others are forked from; wait while too many came before.\"\"\"
    (FOLDER / "seen" / f"{LOADED_IN}-{uuid.uuid4()}").touch()
    number = len(os.listdir(FOLDER / "seen"))
    while int((FOLDER / "allowed").read_text()) < number:
        await asyncio.sleep(0.05)

class Game:
    def reset(self, **row):
        asyncio.run(pass_the_gate())

    def guess(self, number: int) -> str:
        \"\"\"Guess.

        Args:
            number: The guess.
        \"\"\"
        return "no"

    def get_reward(self) -> float:
        return 1.0

async def play(row, generate):
    print("a game begins")
    await pass_the_gate()
    turn = await generate([{"role": "user", "content": row["question"]}])
    return float(len(turn.token_ids) % 5)
"""

ASKS = """
import json, os, time, urllib.parse, urllib.request, uuid
from pathlib import Path

FOLDER = Path(__file__).parent
(FOLDER / "endpoints" / urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"]).netloc).touch()
(FOLDER / "seen" / f"program-{os.getppid()}-{uuid.uuid4()}").touch()
number = len(os.listdir(FOLDER / "seen"))
while int((FOLDER / "allowed").read_text()) < number:
    time.sleep(0.05)
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "1 + 1?"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
urllib.request.urlopen(request).read()
Path(os.environ["RLHF_REWARD"]).write_text("1")
"""


@pytest.mark.faults
def test_rollouts_are_played_on_both_nodes_and_a_killed_worker_costs_time_alone(token: None, tmp_path: Path) -> None:
    """The driver's node has no CPUs; each of the others has an engine, too large to share a node, and a worker."""
    game, data, per_step = tmp_path / "game", tmp_path / "data", 16
    for folder in ("seen", "endpoints"):
        (game / folder).mkdir(parents=True)
    (game / "plays.py").write_text(PLAYS)
    (game / "asks.py").write_text(ASKS)
    write_quickstart(data, warmup_steps=0, train_rows=64, test_rows=2, tools=True)
    lines = (data / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"environment": ("play", "class", "program")[i % 3]} for i, line in enumerate(lines)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_name = {
        "class": f"{game}/plays.py:Game", "play": f"{game}/plays.py:play",
        "program": {"name": "program", "command": ["python", f"{game}/asks.py"]},
    }  # fmt: skip
    config = write_config(
        tmp_path, data, run={"steps": 3, "max_useless_steps": None}, evaluation={"at_start": False, "at_end": False},
        environment={
            "by_name": by_name, "files": [str(game)], "wall_seconds": STACK_WAIT_S, "env": ["GAME_KEY"],
        },
        rollout={"prompts_per_step": 4, "max_rollout_tokens": 48}, logging={"wandb": {"mode": "disabled"}},
        cluster={"cpus_per_learner": 0.3, "cpus_per_engine": 0.7, "engines": 2, "rollout_workers": 2},
    )  # fmt: skip

    def allow(sessions: int) -> None:
        (game / "new").write_text(str(sessions))
        (game / "new").rename(game / "allowed")

    def nodes() -> set[int]:
        return {int(name.partition("-")[0]) for name in os.listdir(game / "seen") if "program" not in name}

    def sessions() -> int:
        return len(os.listdir(game / "seen"))

    allow(1)  # the session of the first prompt, which the driver shows
    script = Path(__file__).parents[1] / "ray_cluster.py"
    cluster = subprocess.Popen([sys.executable, script, "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cluster.stdout is not None
    try:
        address = json.loads(cluster.stdout.readline())["address"]
        program = subprocess.Popen(
            [sys.executable, "-m", "rlhf.grpo", "--config", config, "reward=[]"],
            env=os.environ | {"RAY_ADDRESS": address, "GAME_KEY": "k"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        output = read_until(program, "first prompt, as the model is given it:")
        (driver,) = nodes()
        output += read_until(program, "starting 2 engine(s)")
        assert eventually(lambda: sessions() == 1 + per_step, STACK_WAIT_S), "not all were reset"
        before = nodes() - {driver}
        actors = sorted(psutil.Process(template).parents()[2].pid for template in before)  # after warden and keeper
        assert all(psutil.Process(actor).cmdline()[0].startswith("ray::") for actor in actors)
        assert len({*actors}) == 2
        held = below({actors[0]})
        os.kill(actors[0], signal.SIGKILL)
        output += read_until(program, "Its 2 open groups began anew; the worker is started again.")
        assert outliving(held) == []
        assert eventually(lambda: sessions() == 1 + per_step * 3 // 2, STACK_WAIT_S), "the groups did not begin anew"
        output += read_until(program, "runs again on node ")
        allow(1 + 4 * per_step)
        (last,) = end(program)[1]
        output += last
        assert program.returncode == 0, output
    finally:
        cluster.communicate(timeout=STACK_WAIT_S)
    played = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted((tmp_path / "run" / "rollouts").iterdir())
    ]
    assert [[row["status"] for row in step] for step in played] == [["ok"] * per_step] * 3
    assert len(nodes() - {driver}) == 3
    assert {name.split(":")[0] for name in os.listdir(game / "endpoints")} == {"127.0.0.1"}
    assert re.search(r"node \S+ \(.+\): environment: a game begins", output)


@pytest.fixture(scope="module")
def cluster_with_dashboard(token: None) -> Iterator[str]:
    """Two nodes by `ray start`, the first with the dashboard; its URL."""
    ray = str(Path(sys.executable).parent / "ray")
    port, dashboard = free_port(), free_port()
    common = ["--block", "--num-cpus=1", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    head = [f"--port={port}", "--head", f"--dashboard-port={dashboard}"]
    processes = []
    try:
        for flags in (head, [f"--address=127.0.0.1:{port}"]):
            started = subprocess.Popen(
                # the agent, which starts jobs, has a port of its own, that any other Ray here may hold
                [ray, "start", *common, *flags, f"--dashboard-agent-listen-port={free_port()}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(started)
            read_until(started, "Ray runtime started")
        url = f"http://127.0.0.1:{dashboard}"
        submit = [ray, "job", "submit", "--address", url, "--no-wait", "--", "true"]
        # the agent that takes jobs comes up some time after Ray says that it is up
        takes_jobs = eventually(lambda: not subprocess.run(submit, capture_output=True).returncode, STACK_WAIT_S)
        assert takes_jobs, "Ray takes no jobs"
        yield url
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=STACK_WAIT_S)


def submission(url: str) -> tuple[list[str], dict[str, str]]:
    command = [str(LAUNCH / "submit.sh"), "--address", url, "--nodes", "2"]
    return command, os.environ | {"PYTHON": sys.executable, "JOB_PYTHON": sys.executable}


@pytest.mark.faults
def test_a_job_trains_across_both_nodes_and_its_log_and_status_come_back(
    cluster_with_dashboard: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The config lies in the working directory, which both nodes unpack at the same place, one after the other."""
    config = write_config(tmp_path, tiny_model_dir, run={"steps": 2}, logging={"wandb": {"mode": "disabled"}})
    submit, environment = submission(cluster_with_dashboard)

    def job(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*submit, "--config", "configs/quickstart.yaml", "--config", str(config), *arguments],
            env=environment, capture_output=True, text=True, timeout=STACK_WAIT_S, check=False,
        )  # fmt: skip

    done = job(*APART[1:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 node(s), all with rlhf" in done.stdout
    assert "step 2/2" in done.stdout
    assert [row["step"] for row in read_steps(tmp_path / "run")] == [1, 2]
    refused = job("run.stepz=7")
    assert refused.returncode == 2
    assert "run.stepz" in refused.stdout + refused.stderr


@pytest.mark.faults
def test_an_id_that_is_taken_leaves_its_job_alone_and_a_job_that_is_stopped_is_no_success(
    cluster_with_dashboard: str,
) -> None:
    submit, environment = submission(cluster_with_dashboard)
    command = [*submit, "--id", "busy", "--module", "timeit", "--", "-n", "1", "import time; time.sleep(1000)"]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = read_until(first, "submitted successfully")
    assert first.stdout is not None
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert "already exists" in second.stdout + second.stderr
    assert first.poll() is None
    ray = Path(sys.executable).parent / "ray"
    subprocess.run([ray, "job", "stop", "--address", cluster_with_dashboard, "busy"], check=True, capture_output=True)
    output += first.stdout.read()
    assert first.wait(timeout=STACK_WAIT_S) == 143, output
    assert "job busy was stopped" in output
