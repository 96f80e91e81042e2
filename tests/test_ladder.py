"""The recipes: what each folder holds, that its configs are valid, and that its commands run to their end."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from waiting import STACK_WAIT_S, read_until

from rlhf import recipe
from rlhf.config import cli
from rlhf.quickstart import make_demonstrations, make_problems, write_quickstart, write_rows

ROOT = Path(__file__).parent.parent
RECIPES = recipe.recipes()
ON_GPUS = [number for number, folder in RECIPES.items() if "H100" in recipe.head_of(folder)["note"]]
WITH_REAL_MODEL = {8}
IN_MAKE_TEST = {2}  # the others are for test-faults


def commands(folder: Path) -> list[list[str]]:
    """The commands of `rlhf` in a recipe's script that have a config, without overrides that the shell fills in."""
    script = (folder / "run.sh").read_text().replace("\\\n", " ").replace("$here", str(folder))
    lines = re.findall(r"^.*\brlhf ([a-z-]+ --config .*)$", script, flags=re.MULTILINE)
    return [[word for word in shlex.split(line) if "$" not in word] for line in lines]


def test_the_ladder_has_no_gap_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(RECIPES) == list(range(1, len(RECIPES) + 1))
    recipe.main([])
    listed = capsys.readouterr().out.splitlines()[1:]
    assert [int(line.split(".")[0]) for line in listed] == list(RECIPES)
    table = re.findall(r"^\| (\d+) \| \[.*\]\((.*)/README.md\)", (ROOT / "recipes/README.md").read_text(), re.MULTILINE)
    assert table == [(str(number), folder.name) for number, folder in RECIPES.items()]


@pytest.mark.parametrize("number", RECIPES)
def test_a_readme_has_its_title_command_minutes_seed_and_curve(number: int) -> None:
    folder = RECIPES[number]
    head = recipe.head_of(folder)
    assert head["title"].startswith(f"{number}. ")
    assert int(head["number"]) == number
    assert "seed" in head["note"]
    assert float(head["minutes"]) <= 30
    links = re.findall(r"\]\(([^)\s]+)\)", head.string)
    assert ("curve.svg" in links) != ("has not been run yet" in head.string)
    assert [link for link in links if "://" not in link and not (folder / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("number", RECIPES)
def test_the_configs_of_a_recipe_are_valid_and_warn_of_nothing(number: int) -> None:
    for program, *arguments in commands(RECIPES[number]):
        schema = cli.PROGRAMS[program].config
        assert schema is not None
        config = cli.parse(f"rlhf.{program}", "", schema, arguments)[0]
        assert list(config.warnings()) == []
        if program in ("grpo", "ppo"):
            cli.parse(f"rlhf.{program}", "", schema, [*arguments, "run.steps=2"])  # as the README says


@pytest.fixture
def own_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose script writes its arguments to the folder of the run, in the place of the ladder."""
    folder = tmp_path / "09-own"
    folder.mkdir()
    (folder / "README.md").write_text("# 9. Own\n\n    rlhf recipe 9    # 77 minutes on two cores, seed 0\n\nText.\n")
    (folder / "run.sh").write_text(
        'mkdir -p "$RUN"; echo "$@" >"$RUN/words"; echo "<svg/>" >"$RUN/curve.svg"; which rlhf'
    )
    monkeypatch.setattr(recipe, "recipes", lambda: {9: folder})
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.slow
def test_each_run_of_a_recipe_has_a_folder_of_its_own(own_recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe.main(["9", "run.steps=2", "run.seed=1"])
    recipe.main(["9"])
    assert Path("runs/recipe-09-own/words").read_text() == "run.steps=2 run.seed=1\n"
    assert Path("runs/recipe-09-own-2/words").read_text() == "\n"
    assert capfd.readouterr().out.splitlines()[0] == f"{sysconfig.get_path('scripts')}/rlhf"
    assert "77 minutes" in (own_recipe / "README.md").read_text()
    with pytest.raises(ValueError, match=r"run\.dir=mine: a recipe names the folder of its run"):
        recipe.main(["9", "run.dir=mine"])
    with pytest.raises(ValueError, match=r"recipe 4: there is no such recipe\. There are 9 to 9\."):
        recipe.main(["4"])


@pytest.mark.slow
def test_a_recorded_run_leaves_its_curve_and_its_minutes_in_the_recipe(own_recipe: Path) -> None:
    recipe.main(["9", "--record"])
    assert (own_recipe / "curve.svg").read_text() == "<svg/>\n"
    readme = (own_recipe / "README.md").read_text()
    assert readme == "# 9. Own\n\n    rlhf recipe 9    # 0.0 minutes on two cores, seed 0\n\nText.\n"


@pytest.mark.slow
def test_a_signal_reaches_the_program_of_the_script_and_its_status_is_that_of_the_recipe(tmp_path: Path) -> None:
    program = "import os, psutil, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
    program += "os.kill(psutil.Process().parent().ppid(), signal.SIGTERM); time.sleep(600)"
    (tmp_path / "run.sh").write_text(f"set -e\npython -c '{program}'\necho went on\n")
    code = "import sys; from pathlib import Path; from rlhf.recipe import run_script; "
    code += "sys.exit(run_script(Path('run.sh'), Path('runs/x'), []))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (143, "")


@pytest.mark.slow
def test_ctrl_c_reaches_the_program_of_the_script_once(tmp_path: Path) -> None:
    program = "import signal, sys, time; told = []; signal.signal(signal.SIGINT, lambda *_: told.append(1)); "
    program += 'print("ready", flush=True); exec("while not told: time.sleep(0.01)"); time.sleep(1); '
    program += 'print(f"told {len(told)} times", flush=True); sys.exit(130)'
    (tmp_path / "run.sh").write_text(f"set -e\npython -c '{program}'\necho went on\n")
    code = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from pathlib import Path; "
    code += "from rlhf.recipe import run_script; sys.exit(run_script(Path('run.sh'), Path('runs/x'), []))"
    keyboard, terminal = os.openpty()
    recipe_process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path, stdin=terminal, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    read_until(recipe_process, "ready")
    os.write(keyboard, b"\x03")
    output, _ = recipe_process.communicate()
    os.close(keyboard)
    os.close(terminal)
    assert (recipe_process.returncode, output) == (130, "told 1 times\n")


@pytest.mark.stack
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=() if number in IN_MAKE_TEST else pytest.mark.faults)
        for number in RECIPES
        if number not in ON_GPUS
    ],
)
def test_a_recipe_runs_to_its_curve(number: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for data, tools in (("quickstart-data", False), ("tools-quickstart-data", True)):
        write_quickstart(tmp_path / "runs" / data, warmup_steps=0, train_rows=600, test_rows=8, tools=tools)
    sums = tmp_path / "runs/quickstart-data"
    for trained in ("quickstart-data/untrained", "letters-sft/model"):  # without minutes of imitation
        shutil.copytree(sums / "model", tmp_path / "runs" / trained)
    write_rows(sums / "demonstrations.jsonl", make_demonstrations(make_problems(50, 0), 320, 0))
    if number in WITH_REAL_MODEL:
        (tmp_path / "runs/real-model-data").mkdir()
        (tmp_path / "runs/real-model-data/SmolLM2-135M-Instruct").symlink_to(request.getfixturevalue("real_model_dir"))
    command = [sys.executable, "-m", "rlhf.recipe", str(number), "run.steps=2", "run.max_useless_steps=null"]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, timeout=2 * STACK_WAIT_S)
    run = tmp_path / "runs" / f"recipe-{RECIPES[number].name}"
    assert (run / "curve.svg").read_text().startswith("<svg")
