"""Images, compose file and Kubernetes manifest: everything that they name exists and agrees with the project."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
import tomllib
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
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


def schema_errors(document: Any, schema: Any) -> list[str]:
    """Where a document is not as its JSON schema wants it."""
    found = jsonschema.validators.validator_for(schema)(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


def documents(name: str) -> list[dict[str, Any]]:
    return [part for part in yaml.safe_load_all((ROOT / name).read_text()) if part is not None]


def grpo_config(command: list[str], configs: dict[str, str]) -> GRPOConfig:
    """The config of a command's `--config FILE` and overrides; `configs` maps files of the image to some here."""
    files = [configs.get(after, after) for flag, after in pairwise(command) if flag == "--config"]
    return load_config(GRPOConfig, files, [a for a in command if "=" in a and not a.startswith("-")])


# --- images ---


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_copies_exists_and_is_not_ignored(path: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert "*" in lines
    assert set(copied(path)) <= let_in
    assert all((ROOT / source).exists() for source in let_in)
    assert {"pyproject.toml", "rlhf", "launch", "configs"} <= set(copied(path))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_installs_what_pyproject_says_and_has_no_versions_of_its_own(path: Path) -> None:
    kind = path.suffix.removeprefix(".")
    assert kind in PROJECT["optional-dependencies"]
    runs = " ".join(of_kind(path, "RUN"))
    assert f"tools/setup.sh {kind} " in runs
    assert not re.search(r"[=<>~]=|\d+\.\d+", runs)
    needed = {Path(f) for f in re.findall(r"tools/[\w.-]+", (ROOT / "tools/setup.sh").read_text())}
    assert {str(name) for name in needed} <= set(copied(path))


def test_the_python_of_the_cpu_image_is_one_that_the_project_takes() -> None:
    (python,) = (rest.partition("=")[2] for rest in of_kind(ROOT / "docker/Dockerfile.cpu", "ARG"))
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    assert int(low) <= int(python.removeprefix("3.")) < int(high)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_the_program_as_a_user_of_its_own_and_has_a_health_check(path: Path) -> None:
    words = [word for word, _ in instructions(path)]
    assert of_kind(path, "USER") == ["1000"]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))
    (entry,) = of_kind(path, "ENTRYPOINT")
    (health,) = of_kind(path, "HEALTHCHECK")
    for script in re.findall(r'\["([^"]+)"\]', entry + health):
        assert script in copied(path)
        assert (ROOT / script).stat().st_mode & 0o111
    assert "docker/healthcheck.sh" in health
    assert words.count("FROM") == 2  # the compiler's leftovers and caches stay behind in the first
    assert all(":latest" not in rest and ":" in rest for rest in of_kind(path, "FROM"))
    assert not any(re.search(r"\bADD\b|\bsudo\b", f"{word} {rest}") for word, rest in instructions(path))
    for run in of_kind(path, "RUN"):
        assert "apt-get" not in run or ("--no-install-recommends" in run and "rm -rf /var/lib/apt/lists" in run)


def test_hadolint_finds_nothing() -> None:
    command = [str(Path(sys.executable).parent / "hadolint"), *map(str, DOCKERFILES)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


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


def test_shellcheck_finds_nothing_in_the_scripts_of_the_images() -> None:
    scripts = sorted((ROOT / "docker").glob("*.sh"))
    found = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", *scripts], capture_output=True, text=True, check=False
    )
    assert found.stdout == ""


# --- compose ---


def test_the_compose_file_is_as_the_compose_specification_wants_it() -> None:
    (compose,) = documents("docker/compose.yaml")
    schema = json.loads((resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
    assert schema_errors(compose, schema) == []
    compose["services"]["head"]["comand"] = []
    assert "'comand'" in str(schema_errors(compose, schema))


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

KUBERAY_SCHEMA = json.loads((ROOT / "launch/kuberay.schema.json").read_text())


def test_the_manifest_is_as_the_api_wants_it() -> None:
    assert schema_errors(documents("launch/kuberay.yaml"), KUBERAY_SCHEMA) == []


def test_the_options_for_rdma_are_as_the_api_wants_them_too() -> None:
    text = (ROOT / "launch/kuberay.yaml").read_text()
    plain = re.search(r"^ +requests: .*\n +limits: .*\n(?= +# With RDMA)", text, re.MULTILINE)
    assert plain is not None
    options = re.sub(
        r"^( +)# (  requests|  limits|securityContext)", r"\1\2", text.replace(plain[0], ""), flags=re.MULTILINE
    )
    parts = list(yaml.safe_load_all(options))
    (group,) = parts[-1]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    requests, limits = (container["resources"][name] for name in ("requests", "limits"))
    (rdma,) = (name for name in requests if name.startswith("rdma/"))
    assert requests[rdma] == limits[rdma]  # Kubernetes wants both to be equal
    assert schema_errors(parts, KUBERAY_SCHEMA) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.entryPoint", "python"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.replicas", "2"),
        ("spec.rayClusterSpec.headGroupSpec.rayStartParams.num-gpus", 0),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.volumeMounts.0.mountPath", "runs"),
        ("spec.rayClusterSpec.authOptions.mode", "tokens"),
    ],
)
def test_a_field_or_type_that_the_api_does_not_have_is_found(path: str, value: Any) -> None:
    parts = documents("launch/kuberay.yaml")
    place: Any = parts[2]
    *way, last = path.split(".")
    for name in way:
        place = place[int(name)] if name.isdigit() else place[name]
    place[last] = value
    assert last in str(schema_errors(parts, KUBERAY_SCHEMA))


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
