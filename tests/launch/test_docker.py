"""Images, compose file and Kubernetes manifest: everything that they name exists and agrees with the project."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
IMAGE_ROOT = "/srv/rlhf/"


def instructions(path: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest), continued lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(w, rest.strip()) for w, _, rest in (line.partition(" ") for line in joined.splitlines()) if w]


def of_kind(path: Path, kind: str) -> list[str]:
    return [rest for word, rest in instructions(path) if word == kind]


def copied(path: Path) -> list[str]:
    """What an image takes from the checkout."""
    return [source for rest in of_kind(path, "COPY") if "--from=" not in rest for source in rest.split()[:-1]]


def documents(name: str) -> list[dict[str, Any]]:
    return [part for part in yaml.safe_load_all((ROOT / name).read_text()) if part is not None]


def grpo_config(command: list[str], configs: dict[str, str]) -> GRPOConfig:
    """The config of a command's `--config FILE` and overrides; `configs` maps files of the image to some here."""
    files = [configs.get(after, after) for flag, after in pairwise(command) if flag == "--config"]
    return load_config(GRPOConfig, files, [a for a in command if "=" in a and not a.startswith("-")])


# --- images ---


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_gets_all_that_it_copies_and_that_its_set_up_and_scripts_need(path: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert set(copied(path)) <= let_in
    assert all((ROOT / source).exists() for source in let_in)
    needed = re.findall(r"tools/[\w.-]+|gpu-constraints.txt", (ROOT / "tools/setup.sh").read_text())
    assert {"pyproject.toml", "setup.py", "rlhf", "launch", "configs", "recipes", *needed} <= set(copied(path))
    assert f"tools/setup.sh {path.suffix[1:]}" in path.read_text()
    for script in re.findall(r'\["([^"]+)"\]', " ".join(of_kind(path, "ENTRYPOINT") + of_kind(path, "HEALTHCHECK"))):
        assert script in copied(path)
        assert (ROOT / script).stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        (["--config", "x.yaml", "run.steps=1"], "python -m rlhf.grpo --config x.yaml run.steps=1"),
        (["run.dir=a b"], "python -m rlhf.grpo run.dir=a b"),
        (["echo", "hello"], "hello"),
        ([], "python -m rlhf.grpo"),
    ],
)
def test_the_entry_point_runs_the_program_or_the_command_it_is_given(
    tmp_path: Path, arguments: list[str], runs: str
) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho python "$@"\n')
    (tmp_path / "python").chmod(0o755)
    shown = subprocess.run(
        [ROOT / "docker/entrypoint.sh", *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == runs


def test_the_health_check_asks_the_head_and_fails_with_it(tmp_path: Path) -> None:
    for name, text in (("python", f'exec {sys.executable} "$@"'), ("ray", 'echo "$@"; exit $RAY_IS')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HEAD_ADDRESS": "head"}

    def check(**more: str) -> subprocess.CompletedProcess[str]:
        script = ROOT / "docker/healthcheck.sh"
        return subprocess.run([script], env=environment | more, capture_output=True, text=True, check=False)

    healthy = check(RAY_IS="0")
    assert (healthy.returncode, healthy.stdout) == (0, "health-check --address head:6379\n")
    assert check(RAY_IS="1").returncode == 1
    assert check(RAY_IS="1", HEAD_ADDRESS="").returncode == 0


# --- compose ---


def test_compose_starts_as_many_nodes_as_it_says_with_a_config_that_is_valid() -> None:
    (compose,) = documents("docker/compose.yaml")
    services = compose["services"]
    nodes = {name: s for name, s in services.items() if s["command"][0] == "launch/ray_node_setup.sh"}
    ranks = [s["command"][s["command"].index("--rank") + 1] for s in nodes.values()]
    assert sorted(ranks) == ["0", "1"]
    for service in services.values():
        assert service["environment"]["NUM_NODES"] == str(len(nodes))
        assert service["environment"]["HEAD_ADDRESS"] in nodes
        assert service["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
        assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        assert {mount.partition(":")[0] for mount in service["volumes"]} <= set(compose["volumes"])
    command = services["head"]["command"]
    config = grpo_config(command, {"configs/quickstart.yaml": str(ROOT / "configs/quickstart.yaml")})
    assert config.cluster.learners == 2
    made = services["data"]["command"][-1]
    assert config.model.path == f"{made}/model"
    reserved = config.cluster.learners * config.cluster.cpus_per_learner + config.cluster.cpus_per_engine
    assert 1 < reserved <= 2  # --num-cpus=1 a node: more than one holds, no more than both


# --- KubeRay ---


def test_the_manifest_runs_a_valid_config_on_as_many_nodes_as_it_makes() -> None:
    config_map, claim, job = documents("launch/kuberay.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    groups = cluster["workerGroupSpecs"]
    workers = sum(group["replicas"] for group in groups)
    entry = job["spec"]["entrypoint"].split()
    assert entry[entry.index("--nodes") + 1] == str(1 + workers)
    assert entry[0] == "python"
    assert (ROOT / entry[1].removeprefix(IMAGE_ROOT)).exists()

    mounted = {volume["name"]: volume for volume in cluster["headGroupSpec"]["template"]["spec"]["volumes"]}
    assert mounted["run"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert mounted["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_manifests_config_fits_its_gpus_and_lies_on_the_shared_volume(tmp_path: Path) -> None:
    config_map, _, job = documents("launch/kuberay.yaml")
    (tmp_path / "run.yaml").write_text(config_map["data"]["run.yaml"])
    entry = job["spec"]["entrypoint"].split()
    config = grpo_config(entry, {"/etc/rlhf/run.yaml": str(tmp_path / "run.yaml")})
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = group["replicas"] * int(limits["nvidia.com/gpu"])
    assert config.cluster.engines * config.cluster.tensor_parallel + config.cluster.learners == gpus
    assert str(config.run.dir).startswith(IMAGE_ROOT + "runs/")


def test_every_pod_has_the_token_the_image_and_the_volumes() -> None:
    *_, job = documents("launch/kuberay.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (ray,) = (d for d in PROJECT["dependencies"] if re.match(r"ray\b", d))
    assert fnmatch.fnmatch(cluster["rayVersion"], re.search(r">=(\d+\.\d+)", ray)[1] + ".*")  # type: ignore[index]
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    specs = [pod["template"]["spec"] for pod in pods]
    for spec in specs:
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsUser"] == 1000
        assert container["image"] == "rlhf:gpu"
        names = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names
