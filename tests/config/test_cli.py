"""The command line of the training programs: --help, flags and overrides in any order, messages, exit status."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import WAIT_S

from rlhf.config.cli import RUN_ERROR, USER_ERROR, parse, run_async, run_program
from rlhf.config.describe import describe_keys
from rlhf.config.grpo import GRPOConfig
from rlhf.config.ppo import PPOConfig
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.reward import OPTIONS_OF_REWARD
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.config.supervised import SFTConfig

ROOT = Path(__file__).parents[2]
MATH, CPU = str(ROOT / "configs/math.yaml"), str(ROOT / "configs/cpu.yaml")


def parsed(*argv: str) -> GRPOConfig:
    return parse("rlhf.grpo", "", GRPOConfig, argv)[0]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rlhf.grpo", *argv], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def help_text() -> str:
    completed = run("--help")
    assert completed.returncode == 0
    return completed.stdout


# --- --help ---


def test_help_lists_every_key_with_its_default_type_and_meaning(help_text: str) -> None:
    for key in describe_keys(GRPOConfig):
        if key.name.startswith("data.eval[]"):  # the same keys as those of data.train
            continue
        shown = f"  {key.name} (required)" if key.default is None else f"  {key.name} = {key.default}"
        assert shown in help_text
        assert key.description, key.name
    for line in ("learner.optimizer.lr = 1e-06", "data.train[].weight = null", "reward.parts[].name (required)"):
        assert f"  {line}" in help_text
    assert "[integer > 0 | null]" in help_text
    assert "[k1 | k2 | k3 | k4]" in help_text


def test_help_lists_the_options_of_every_reward(help_text: str) -> None:
    for reward, options in OPTIONS_OF_REWARD.items():
        for name, field in options.model_fields.items():
            assert f"  {reward}: {name} {'(required)' if field.is_required() else '= '}" in help_text


def test_help_fits_in_100_columns(help_text: str) -> None:
    assert max(map(len, help_text.splitlines())) <= 100


def test_a_program_offers_no_choice_that_it_always_refuses() -> None:
    grpo, ppo = ({key.name: key.kind for key in describe_keys(schema)} for schema in (GRPOConfig, PPOConfig))
    assert grpo["algo.advantage"] == "grpo | dr_grpo | rloo | maxrl | reinforce_pp | reinforce_pp_baseline | text"
    assert grpo["cluster.placement"] == "separate | colocated"
    assert (ppo["algo.advantage"], ppo["cluster.placement"]) == ("gae", "separate | colocated")


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom rlhf.grpo import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers', 'deepspeed') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"


# --- flags and overrides ---


@pytest.mark.parametrize(
    "argv",
    [
        ("--config", MATH, "--config", CPU, "run.steps=3", "rollout.max_response_tokens=64"),
        ("run.steps=3", "--config", MATH, "rollout.max_response_tokens=64", "--config", CPU),
        ("--config", MATH, "run.steps=3", "--config", CPU, "--plan", "rollout.max_response_tokens=64"),
        (f"--config={MATH}", "run.steps=3", "rollout.max_response_tokens=64", f"--config={CPU}"),
    ],
)
def test_overrides_win_over_all_files_wherever_they_stand(argv: tuple[str, ...]) -> None:
    config = parsed(*argv)
    assert (config.run.steps, config.rollout.max_response_tokens) == (3, 64)
    assert config.cluster.device == "cpu"
    assert config.model.dtype == "float32"


def configs_of_policies() -> list[tuple[str, ...]]:
    """Every config of rlhf.grpo and rlhf.ppo in this repository, an overlay after the one that it stands on."""
    others = {"cpu.yaml", "reward_model_quickstart.yaml", "sft_quickstart.yaml"}
    names = {path.name for path in (ROOT / "configs").glob("*.yaml")} - others
    below = {"cispo.yaml": "dapo.yaml", "reinforce_pp.yaml": "dr_grpo.yaml"}
    return [(below[name], name) if name in below else (name,) for name in sorted(names)]


@pytest.mark.parametrize("base", configs_of_policies(), ids="+".join)
@pytest.mark.parametrize("count", [1, 2])
def test_the_cpu_overlay_goes_on_top_of_every_config(base: tuple[str, ...], count: int) -> None:
    files = [argument for name in base for argument in ("--config", str(ROOT / "configs" / name))]
    overrides = ["model.path=DIR/model", "data.train=../x/train.jsonl", "data.eval=../x/test.jsonl", "run.dir=runs/x"]
    overrides += ["run.steps=3", f"cluster.learners={count}", f"cluster.engines={count}"]
    config: GRPOConfig
    if base[0].startswith("ppo_"):
        overrides += ["critic.warmup_steps=0", "critic.schedule.warmup_steps=0"]
        config = parse("rlhf.ppo", "", PPOConfig, [*files, "--config", CPU, *overrides])[0]
    else:
        config = parsed(*files, "--config", CPU, *overrides)
    cluster = config.cluster
    assert cluster.device == "cpu"
    assert config.max_sequence_tokens <= 2048  # the context of the quickstart's model
    assert cluster.engines * cluster.cpus_per_engine + cluster.learners * cluster.cpus_per_learner <= 2
    assert config.data.eval_rows is not None
    assert config.data.eval_rows <= 64
    assert config.data.train[0].name is None


# --- messages and exit status ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "start", "remedy"),
    [
        ((), "--config: no file given", "python -m rlhf.grpo --config configs/math.yaml"),
        (("--config", MATH, "--lr", "1"), "--lr: there is no such flag", " learner.optimizer.lr"),
        (("--config", MATH, "algo.clip_low=1.5", "--plan"), "algo.clip_low=1.5 ", "Use 0.2"),
    ],
)
def test_a_user_error_is_one_message_and_exit_status_2(argv: tuple[str, ...], start: str, remedy: str) -> None:
    completed = run(*argv)
    assert completed.returncode == USER_ERROR
    assert completed.stderr.startswith(f"error: {start}")
    assert remedy in completed.stderr
    assert len(completed.stderr.splitlines()) == 1
    assert completed.stdout == ""


@pytest.mark.parametrize(
    ("program", "schema", "files", "remedy"),
    [
        ("sft", SFTConfig, ["math.yaml"], "Start rlhf grpo with it"),
        ("grpo", GRPOConfig, ["sft_quickstart.yaml"], "Start rlhf sft with it"),
        ("ppo", PPOConfig, ["math.yaml", "cpu.yaml"], "Start rlhf grpo with it"),
        ("sft", SFTConfig, ["sft_quickstart.yaml", "cpu.yaml"], "leave it out"),
        ("evaluate", GRPOConfig, ["ppo_math.yaml"], "Add --program ppo."),
        ("reward_model", RewardTrainingConfig, ["math.yaml"], "Start rlhf grpo with it, or leave it out."),
    ],
)
def test_a_config_of_another_program_is_one_message_that_names_that_program(
    program: str, schema: type[TrainingProgramConfig], files: list[str], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(MATH).parent)
    given = [part for file in files for part in ("--config", file)]
    with pytest.raises(ValueError, match=rf"^--config \S+: a config of rlhf .*{re.escape(remedy)}") as caught:
        parse(f"rlhf.{program}", "", schema, given)
    assert len(str(caught.value).splitlines()) == 1


def test_an_unknown_flag_names_the_flag_that_it_is_most_like() -> None:
    with pytest.raises(ValueError, match=r"^--plann: there is no such flag.* Did you mean --plan\? "):
        parsed("--config", MATH, "--plann")


@pytest.mark.parametrize(
    ("program", "schema", "file", "remedy"),
    [
        ("sft", SFTConfig, "sft_quickstart.yaml", "Set it to null."),
        (
            "reward_model",
            RewardTrainingConfig,
            "reward_model_quickstart.yaml",
            "Use eval/accuracy or eval/margin, with",
        ),
    ],
)
def test_the_best_checkpoint_needs_a_number_that_is_measured(
    program: str, schema: type[TrainingProgramConfig], file: str, remedy: str
) -> None:
    given = ["--config", str(Path(MATH).parent / file), "checkpoint.best=x"]
    with pytest.raises(ValueError, match=rf"^checkpoint\.best=x: .* {re.escape(remedy)}"):
        parse(f"rlhf.{program}", "", schema, given)


def test_an_error_at_run_time_has_another_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("engine 0 died")

    assert run_program(fail) == RUN_ERROR
    assert capsys.readouterr().err == "error: engine 0 died\n"


def test_a_listing_that_nobody_reads_to_its_end_is_no_error() -> None:
    """As with `| head -1`, which has closed the pipe before the second line comes."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.recipe"], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_message_and_a_traceback_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: Exception) -> None:
        error.add_note("engine-0.log: \x1b[2J")
        raise error

    for error in (
        ValueError("\x1b[2J.yaml: no file"),
        RuntimeError("\x1b[2J"),
        KeyError("\x1b[2J"),
        OSError("\x1b[2J"),
    ):
        assert run_program(lambda error=error: fail(error)) in (RUN_ERROR, USER_ERROR)  # type: ignore[misc]
        printed = capsys.readouterr().err
        assert "\\u001b[2J" in printed or "\\x1b[2J" in printed
        assert "\x1b" not in printed


def test_an_interrupted_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert run_program(interrupt) == 130
    assert capsys.readouterr().err == "interrupted\n"


# --- inside of a running event loop, as in the cell of a notebook ---


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


def test_a_program_runs_inside_of_a_running_event_loop_which_goes_on_after_it() -> None:
    async def cell() -> list[object]:
        loop, signals = asyncio.get_running_loop(), list[str]()
        loop.add_signal_handler(signal.SIGTERM, signals.append, "SIGTERM")
        task = asyncio.create_task(answer())
        results: list[object] = [run_async(answer()), await task, asyncio.get_running_loop() is loop]
        os.kill(os.getpid(), signal.SIGTERM)  # the handler of the outer loop is back
        while not signals:
            await asyncio.sleep(0.01)
        return results

    assert asyncio.run(cell()) == [42, 42, True]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ctrl_c_reaches_a_program_that_runs_inside_of_a_running_event_loop() -> None:
    asked: list[str] = []

    def on_signal(name: str, cancel: Callable[[], object]) -> None:
        asked.append(name)
        cancel()

    async def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(WAIT_S)

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            run_async(interrupted(), on_signal=on_signal)
        await asyncio.sleep(0)

    asyncio.run(cell())
    assert asked == ["SIGINT"]


def test_a_program_in_another_thread_than_the_main_one_says_where_to_call_it() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="runs in the main thread"):
        pool.submit(lambda: run_async(answer())).result()
