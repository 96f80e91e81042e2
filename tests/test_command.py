"""The command `rlhf`: every program under its name, the configs, the version, completion."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlhf import command
from rlhf.config import cli
from rlhf.config.describe import describe_keys
from rlhf.config.ppo import PPOConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def rlhf(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command as it is installed: a script of that name which calls the entry point."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["rlhf"]
    module, function = entry.split(":")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {module} import {function}; {function}()"
    script = cwd / "rlhf" if cwd != ROOT else None
    if script is not None:
        script.write_text(code)
    started = [sys.executable, str(script)] if script else [sys.executable, "-c", code]
    return subprocess.run([*started, *arguments], capture_output=True, text=True, check=False, cwd=cwd)


def test_help_names_every_program_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom rlhf.command import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    top = {path.stem for path in (ROOT / "rlhf").glob("*.py")} - {"__init__", "types", "command"}
    assert {name.replace("-", "_") for name in command.PROGRAMS} == top | {"report"}
    assert all(f"\n  {name} " in done.stdout for name in command.PROGRAMS)


def test_a_program_is_started_with_its_arguments_and_keeps_its_exit_status(tmp_path: Path) -> None:
    done = rlhf("grpo", "--config", str(ROOT / "configs/math.yaml"), "run.step=3", "--plan", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: run.step=3: there is no such key. Did you mean run.steps?\n"
    planned = rlhf("ppo", "--plan", "--config", str(ROOT / "configs/ppo_math.yaml"), cwd=tmp_path)
    assert planned.returncode == 0
    assert "optimizer steps, critic" in planned.stdout


def test_help_of_a_program_says_how_it_was_started(tmp_path: Path) -> None:
    assert rlhf("score", "--help", cwd=tmp_path).stdout.startswith("usage: rlhf score ")
    assert "rlhf reward-model --config " in rlhf("reward-model", cwd=tmp_path).stderr


def test_a_config_is_copied_once(tmp_path: Path) -> None:
    assert "quickstart " in rlhf("configs").stdout
    assert rlhf("configs", "copy", "quickstart", "mine.yaml", cwd=tmp_path).returncode == 0
    assert (tmp_path / "mine.yaml").read_text() == (ROOT / "configs/quickstart.yaml").read_text()
    again = rlhf("configs", "copy", "quickstart", "mine.yaml", cwd=tmp_path)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    with pytest.raises(ValueError, match=r"configs copy quick: .*\bcispo, .*\bquickstart\b"):
        command.main(["configs", "copy", "quick"])


def test_a_config_of_the_package_is_taken_where_there_is_no_such_file(tmp_path: Path) -> None:
    arguments = ["grpo", "--config", "configs/quickstart.yaml", "--print-config"]
    done = rlhf(*arguments, cwd=tmp_path)
    own = cli.shipped_folder("configs") / "quickstart.yaml"
    assert done.stderr == f"--config configs/quickstart.yaml: not in this folder; taking {own}\n"
    assert "runs/quickstart-data/model" in done.stdout
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.yaml").write_text("run: {steps: 3}")
    assert "model.path: required" in rlhf(*arguments, cwd=tmp_path).stderr
    assert "configs/quick.yaml" in rlhf("grpo", "--config", "configs/quick.yaml", cwd=tmp_path).stderr


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with pytest.raises(SystemExit):
        command.main(["--version"])
    assert capsys.readouterr().out == f"rlhf {version}\n"


def complete(script: Path, line: str) -> set[str]:
    words = line.split(" ")
    code = f"source {script}; compopt() {{ :; }}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _rlhf; "
    shell = subprocess.run(["bash", "-c", code + 'echo "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True)
    return set(shell.stdout.split())


@pytest.mark.parametrize(("argument", "status"), [("zsh", 2), ("--help", 0)])
def test_completion_is_for_bash_alone(argument: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["completion", argument])
    assert ended.value.code == status
    assert "COMP_WORDS" not in capsys.readouterr().out


def test_bash_completes_programs_and_keys(tmp_path: Path) -> None:
    script = tmp_path / "completion.sh"
    script.write_text(command.completion())
    assert complete(script, "rlhf re") == {"recipe", "report", "reward-model"}
    assert complete(script, "rlhf ppo critic.optimizer.l") == {"critic.optimizer.lr="}
    keys = {f"{key.name}=" for key in describe_keys(PPOConfig) if "[]" not in key.name}
    assert complete(script, "rlhf ppo ") == keys
