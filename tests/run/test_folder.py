"""The run folder: rollouts that read back line by line, checkpoints that are verified, what is not written over."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import group_of, joined, make_config, make_groups, rollout_of

from rlhf.config.data import DatasetConfig
from rlhf.config.load import resolved_yaml
from rlhf.export import find_checkpoint
from rlhf.log.patient_files import PatientFiles
from rlhf.run.checkpoint_mirror import Mirror
from rlhf.run.folder import RunFolder, best_step, config_that_trained_on, with_date
from rlhf.run.rollout_log import rollout_rows
from rlhf.run.state import RunState
from rlhf.types import RolloutGroup, VersionSpan

CONFIG = make_config(Path("x/model"))


def test_a_response_with_any_line_separator_stays_on_one_line(tmp_path: Path) -> None:
    (group,) = make_groups(groups=1, samples=1, vocabulary=9, longest=5, seed=0)
    text = "a\x85b\u2028c\u2029d\ne\x1cf é 三"
    sample = dataclasses.replace(group.samples[0], text=text)
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.rollouts.mkdir(parents=True)
    folder.write_rollouts(1, rollout_rows(1, [RolloutGroup(group.prompt, (sample,))], [0.5]), PatientFiles(print))
    content = (folder.rollouts / "step-000001.jsonl").read_text()
    assert "三" in content
    (line,) = content.splitlines()
    assert json.loads(line)["text"] == text


def test_half_a_character_in_what_an_environment_says_is_written_and_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.rollouts.mkdir(parents=True)
    folder.write_rollouts(1, [{"error": "a\ud800 é"}], PatientFiles(print))
    assert json.loads((folder.rollouts / "step-000001.jsonl").read_text()) == {"error": "a\ud800 é"}


def test_a_rollout_has_one_row_with_all_its_tokens_and_versions_and_its_turns_and_facts_if_it_has_any() -> None:
    first = rollout_of([9, 1, 2], [0, 1, 1], None, (VersionSpan(1, 3, 4),))
    both = joined(first, rollout_of([9, 3], [0, 1], None, (VersionSpan(1, 2, 5),)))
    turns = ({"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"})
    both = dataclasses.replace(both, turns=turns, facts={"calls": 2})
    row, plain = rollout_rows(1, [group_of([both, first])], [0.5, -0.5])
    assert (row["response_tokens"], row["versions"]) == (3, [[1, 3, 4], [1, 2, 5]])
    assert (row["turns"], row["facts"]) == (list(turns), {"calls": 2})
    assert not {"turns", "facts"} & plain.keys()


# --- damaged checkpoints are skipped ---


def write_checkpoints(path: Path, *steps: int, keep: int = 9) -> RunFolder:
    folder = RunFolder(path, resume=False)
    for step in steps:
        partial = folder.begin_checkpoint(step)
        (partial / "weights-00000.safetensors").write_bytes(bytes(range(256)) * 100)
        (partial / "critic").mkdir()
        (partial / "critic" / "exp_avg-00000.safetensors").write_bytes(b"moments" * 100)
        folder.finish_checkpoint(partial, RunState(step=step), keep=keep)
    return folder


def flip_one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_damaged_checkpoints_do_not_count_as_kept_ones(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, 2, 8)
    flip_one_bit(tmp_path / "checkpoints" / "step-000008" / "weights-00000.safetensors")
    resumed = RunFolder(tmp_path, resume=True)
    for step in (4, 6):
        resumed.finish_checkpoint(resumed.begin_checkpoint(step), RunState(step=step), keep=2)
    assert sorted(path.name[-1] for path in resumed.checkpoints.glob("step-*")) == ["4", "6", "8"]
    resumed.finish_checkpoint(resumed.begin_checkpoint(8), RunState(step=8), keep=2)
    assert sorted(path.name[-1] for path in resumed.checkpoints.glob("step-*")) == ["6", "8"]
    assert RunFolder(tmp_path, resume=True).restored == resumed.checkpoints / "step-000008"


# --- what is not of this run stays as it is ---

COPIES = (
    "step-000002-mine",
    "step-000004.bak",
    "step-000004.bad",
    "step-4",
    "step-0000004",
    "step-000008.mine.partial",
)


def copy_under(folder: Path, names: tuple[str, ...]) -> None:
    newest = max(folder.glob("step-*[0-9]"))
    for name in names:
        shutil.copytree(newest, folder / name)


def test_copies_of_checkpoints_are_not_resumed_from_counted_or_removed(tmp_path: Path) -> None:
    run = write_checkpoints(tmp_path, 2, 4)
    copy_under(run.checkpoints, COPIES)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step-000009-mine.jsonl").write_text("{}\n")
    resumed = RunFolder(tmp_path, resume=True)
    assert (resumed.restored, resumed.warnings) == (run.checkpoints / "step-000004", ())
    resumed.create(CONFIG)
    for step in (6, 8):
        resumed.finish_checkpoint(resumed.begin_checkpoint(step), RunState(step=step), keep=1)
    resumed.unlock()
    RunFolder(tmp_path, resume=True, start_at="step-000008").create(CONFIG)
    assert {path.name for path in run.checkpoints.glob("step-*")} == {"step-000008", *COPIES}
    assert (tmp_path / "rollouts" / "step-000009-mine.jsonl").exists()
    with pytest.raises(ValueError, match=r"--resume-from step-000004\.bak: .*\bstep-000008\b"):
        RunFolder(tmp_path, resume=True, start_at="step-000004.bak")


def test_a_checkpoint_of_another_run_is_named_and_left_alone_even_where_this_run_would_write(tmp_path: Path) -> None:
    other, run = write_checkpoints(tmp_path / "other", 6, 8), write_checkpoints(tmp_path / "run", 2)
    run.create(CONFIG)
    run.unlock()
    shutil.copytree(other.checkpoints / "step-000008", run.checkpoints / "step-000008")
    (run.checkpoints / "step-000006").mkdir()
    (run.checkpoints / "step-000006" / "notes.txt").write_text("mine")
    resumed = RunFolder(tmp_path / "run", resume=True)
    assert resumed.restored == run.checkpoints / "step-000002"
    assert f"step-000008: it is of another run, {other.id}" in resumed.warnings[0]
    for step in (6, 8):
        with pytest.raises(OSError, match=rf"/step-00000{step}\b"):
            resumed.begin_checkpoint(step)
    resumed.finish_checkpoint(resumed.begin_checkpoint(9), RunState(step=9), keep=1)
    RunFolder(tmp_path / "run", resume=True, start_at="step-000009").create(CONFIG)
    assert names(run) == [6, 8, 9]
    assert (run.checkpoints / "step-000006" / "notes.txt").read_text() == "mine"


def test_checkpoints_of_more_than_six_digits_are_newer_than_those_of_six(tmp_path: Path) -> None:
    run = write_checkpoints(tmp_path, 999_999, 1_000_000)
    assert RunFolder(tmp_path, resume=True).saved_step == 1_000_000
    RunFolder(tmp_path, resume=True, start_at="step-999999").create(CONFIG)
    assert [path.name for path in run.checkpoints.glob("step-*")] == ["step-999999"]


def test_a_mirror_keeps_what_is_not_of_this_run_and_takes_nothing_of_another(tmp_path: Path) -> None:
    mirror, far = Mirror(f"file://{tmp_path}/far", waits_s=()), tmp_path / "far"
    first = RunFolder(tmp_path / "first", resume=False, mirror=mirror)
    second = RunFolder(tmp_path / "second", resume=False, mirror=mirror)  # at a time when the place is empty
    RunFolder(tmp_path / "crashed", resume=False, mirror=mirror).create(CONFIG)
    first.create(CONFIG)  # the crashed one has left no checkpoint
    for step in (1, 2, 3):
        checkpoint = first.finish_checkpoint(first.begin_checkpoint(step), RunState(step=step), keep=9)
        mirror.send(checkpoint, [], pointer="latest", keep=9, run_id=first.id)
    with pytest.raises(ValueError, match=rf"mirror={mirror.url}: .*\b{first.id}\b"):
        second.create(CONFIG)
    copy_under(far, COPIES)
    (far / "step-000001" / "run_id").write_text("somebody\n")
    (far / "step-000000").mkdir()
    (far / "step-000000" / "notes.txt").write_text("mine")
    stays = {*COPIES, "step-000000", "step-000001"}
    mirror.send(checkpoint, [], pointer="latest", keep=1, run_id=first.id)
    assert {path.name for path in far.glob("step-*")} == {*stays, "step-000003"}
    mirror.remove_newer("step-000000", first.id)
    assert {path.name for path in far.glob("step-*")} == stays
    later = second.finish_checkpoint(second.begin_checkpoint(9), RunState(step=9), keep=9)
    with pytest.raises(OSError, match=rf"\b{first.id}\b"):
        mirror.send(later, [], pointer="latest", keep=1, run_id=second.id)
    with pytest.raises(OSError, match=rf"\b{first.id}\b"):
        mirror.remove_newer("step-000000", second.id)
    assert {path.name for path in far.glob("step-*")} == stays


# --- a folder that is renamed while the run uses it ---


def test_a_renamed_folder_is_not_made_a_second_time_and_is_written_again_once_it_has_its_name_back(
    tmp_path: Path,
) -> None:
    run, files = RunFolder(tmp_path / "a", resume=False), PatientFiles(print)
    run.create(CONFIG)
    (tmp_path / "a").rename(tmp_path / "b")
    files.append(run.metrics, "1\n")
    with pytest.raises(FileNotFoundError):
        run.begin_checkpoint(1)
    assert not run.path.exists()
    (tmp_path / "b").rename(tmp_path / "a")
    files.check()
    assert run.metrics.read_text() == "1\n"
    run.finish_checkpoint(run.begin_checkpoint(1), RunState(step=1), keep=1)
    assert RunFolder(tmp_path / "a", resume=True).saved_step == 1


# --- the best checkpoint ---

METRIC = "eval/test/avg@1"


def write_scored(folder: RunFolder, scores: dict[int, float], *, steps: list[int], keep: int) -> None:
    """A checkpoint at each of these steps, and an evaluation at those of `scores`."""
    for step in steps:
        done = {at: {METRIC: score} for at, score in scores.items() if at <= step}
        state = RunState(step=step, evaluations=done)
        folder.finish_checkpoint(folder.begin_checkpoint(step), state, keep=keep, best=METRIC)


def names(folder: RunFolder) -> list[int]:
    return sorted(int(path.name[-1]) for path in folder.checkpoints.glob("step-*"))


def test_the_checkpoint_with_the_highest_metric_is_kept_besides_the_newest_and_can_be_gone_on_from(
    tmp_path: Path,
) -> None:
    scores = {0: 0.9, 2: 0.1, 3: 0.5, 4: 0.5, 6: 0.2, 7: 0.3}
    folder = RunFolder(tmp_path, resume=False)
    write_scored(folder, scores, steps=[1, 2, 3, 4, 5, 6, 7], keep=2)
    assert names(folder) == [3, 6, 7]  # step 0 has no checkpoint, and the first of equal ones counts
    assert find_checkpoint(folder.checkpoints / "best") == folder.checkpoints / "step-000003"
    assert RunFolder(tmp_path, resume=True).saved_step == 7
    with pytest.raises(ValueError, match=r"--resume-from step-000004: .*\bstep-000003, step-000006, step-000007\b"):
        RunFolder(tmp_path, resume=True, start_at="step-000004")

    resumed = RunFolder(tmp_path, resume=True, start_at="best")
    assert (resumed.restored, names(resumed)) == (folder.checkpoints / "step-000003", [3, 6, 7])
    resumed.create(CONFIG)
    assert names(resumed) == [3]  # a later --resume must not take those of the part that is left behind
    write_scored(resumed, {2: 0.1, 3: 0.5, 5: 0.6}, steps=[5, 6], keep=1)
    assert names(resumed) == [5, 6]


def test_the_mirror_keeps_the_best_checkpoint_too_and_loses_those_that_are_left_behind(tmp_path: Path) -> None:
    mirror, far = Mirror(f"file://{tmp_path}/far", waits_s=()), tmp_path / "far"
    folder = RunFolder(tmp_path / "run", resume=False, mirror=mirror)
    for step, score in ((1, 0.2), (2, 0.8), (3, 0.1), (4, 0.3)):
        write_scored(folder, {2: 0.8, step: score}, steps=[step], keep=1)
        for file in ("best", "latest"):
            name = (folder.checkpoints / file).read_text().strip()
            mirror.send(folder.checkpoints / name, [], pointer=file, keep=1, run_id=folder.id)
    assert sorted(path.name for path in far.glob("step-*")) == ["step-000002", "step-000004"]
    shutil.rmtree(tmp_path / "run")
    resumed = RunFolder(tmp_path / "run", resume=True, mirror=mirror, start_at="best")
    resumed.create(CONFIG)
    assert resumed.saved_step == 2
    assert sorted(path.name for path in far.glob("step-*")) == ["step-000002"]


# --- a folder that is not empty ---


def test_a_folder_without_a_finished_step_is_used_again_and_keeps_its_logs(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, resume=False)
    first.create(CONFIG)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-1.err").write_text("no memory\n")
    first.metrics.write_text('{"step": 0, "eval/test/avg@1": 0.3}\n')
    first.unlock()  # its process has ended
    for _ in range(2):
        folder = RunFolder(tmp_path, resume=False)
        folder.create(CONFIG)
        folder.unlock()
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "logs" / "worker-1.err").read_text() == "no memory\n"


@pytest.mark.parametrize(
    "file",
    [
        "rollouts/step-000001.jsonl",
        "checkpoints/step-000001.partial/weights-00000.safetensors",
        "summary.json",
        "model/config.json",
        "notes.md",
    ],
)
def test_a_folder_with_files_of_a_step_or_of_a_person_is_refused(tmp_path: Path, file: str) -> None:
    RunFolder(tmp_path, resume=False).create(CONFIG)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("x")
    with pytest.raises(ValueError, match=rf"^run\.dir={tmp_path}: .*rm -r"):
        RunFolder(tmp_path, resume=False)


@pytest.mark.parametrize("line", ['{"step": 1, "reward/mean": 0.5}', '{"step": 0}\n{"ste', "[]"])
def test_a_folder_with_other_metrics_than_those_of_step_0_is_refused(tmp_path: Path, line: str) -> None:
    folder = RunFolder(tmp_path, resume=False)
    folder.create(CONFIG)
    folder.metrics.write_text(line + "\n")
    with pytest.raises(ValueError, match=rf"^run\.dir={tmp_path}: .*rm -r"):
        RunFolder(tmp_path, resume=False)


def test_a_folder_that_is_not_a_runs_is_refused_and_never_advised_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("run: {dir: x}\n")
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, Path()):
        with pytest.raises(ValueError, match=r"^run\.dir=.*\(checkpoints, config\.yaml\)") as e:
            RunFolder(path, resume=False)
        assert "rm -r" not in str(e.value)
        assert str(e.value).endswith(f"Name a new folder, such as run.dir={tmp_path / 'run'}.")
    write_checkpoints(tmp_path / "run", 1)
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(ValueError, match=rf"^run\.dir=\.: .*rm -r {tmp_path}/run\)"):
        RunFolder(Path(), resume=False)


@pytest.mark.slow
def test_a_second_run_cannot_start_in_the_folder_of_a_starting_run(tmp_path: Path) -> None:
    script = (
        "import sys; from test_folder import CONFIG; from rlhf.run.folder import RunFolder\n"
        f"folder = RunFolder({str(tmp_path)!r}, resume=False); folder.create(CONFIG); print('up', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        with pytest.raises(ValueError, match=rf"^run\.dir={tmp_path}: .*\(run\.dir={tmp_path}-2\)"):
            RunFolder(tmp_path, resume=False).create(CONFIG)
        write_checkpoints(tmp_path, 1)
        with pytest.raises(ValueError, match=rf"^run\.dir={tmp_path}: .*\(run\.dir={tmp_path}-2\)"):
            RunFolder(tmp_path, resume=True).create(CONFIG)
        other.kill()
    RunFolder(tmp_path, resume=True).create(CONFIG)


def test_resuming_is_suggested_only_if_there_is_a_complete_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, resume=False)
    folder.create(CONFIG)
    folder.metrics.write_text('{"step": 1}\n')
    folder.begin_checkpoint(1)
    (folder.checkpoints / "step-000002").mkdir()
    with pytest.raises(ValueError, match=rf"^run\.dir={tmp_path}: .*rm -r") as caught:
        RunFolder(tmp_path, resume=False)
    assert "--resume" not in str(caught.value)
    folder.finish_checkpoint(folder.begin_checkpoint(1), RunState(step=1), keep=1)
    with pytest.raises(ValueError, match=r"--resume"):
        RunFolder(tmp_path, resume=False)


# --- what a run leaves for evaluations of its models ---


@pytest.mark.slow
def test_a_model_was_trained_on_the_data_of_its_run_and_of_the_run_that_made_its_start_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second", "other"):
        Path(f"{name}.jsonl").write_text(name)
    Path("copy.jsonl").write_text("first")
    hub = {"path": "openai/gsm8k", "name": "main"}
    for name, model, data in (("a", "hub/model", ["first.jsonl", hub]), ("b", "runs/a/model", ["second.jsonl"])):
        folder = RunFolder(f"runs/{name}", resume=False)
        folder.create(make_config(Path(model), run={"dir": f"runs/{name}"}, data={"train": data}))
        checkpoint = folder.finish_checkpoint(folder.begin_checkpoint(1), RunState(step=1), keep=9)
        folder.unlock()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/linked").symlink_to(tmp_path / checkpoint / "model")
    monkeypatch.chdir(tmp_path / "elsewhere")

    def of(model: str, path: str, **keys: str) -> str:
        run = config_that_trained_on(DatasetConfig(path=path, **keys), f"../runs/{model}/model")
        return "" if run is None else run.parent.name

    assert of("b", "../second.jsonl") == "b"
    assert of("b", f"{tmp_path}/first.jsonl") == of("b", "../copy.jsonl") == of("a", "../copy.jsonl") == "a"
    assert of("a", "../second.jsonl") == of("b", "../other.jsonl") == of("b", "../missing.jsonl") == ""
    assert of("a", "openai/gsm8k", name="main", split="train") == "a"
    assert of("a", "openai/gsm8k", name="main") == of("a", "openai/gsm8k", split="train") == ""
    assert config_that_trained_on(DatasetConfig(path="../first.jsonl"), "hub/model") is None
    assert config_that_trained_on(DatasetConfig(path="../second.jsonl"), "linked") == tmp_path / "runs/b/config.yaml"
    (tmp_path / "runs/a/config.yaml").write_text("data: {train: [")  # damaged
    assert of("a", "../first.jsonl") == ""


def test_a_run_keeps_the_day_of_its_first_start_and_so_do_its_mirror_and_evaluations_of_its_models(
    tmp_path: Path,
) -> None:
    first, later = datetime.date(2026, 1, 2), datetime.date(2026, 3, 4)
    place = {"dir": str(tmp_path / "run")}
    config = make_config(Path("x/model"), run=place)
    assert config.data.date is None
    began = with_date(config, today=first)
    assert began.data.date == first
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.create(began)
    folder.unlock()
    assert with_date(config, today=later) == began
    assert with_date(with_date(make_config(Path("x/model")), today=later)).data.date == later  # its own
    checkpoint = folder.finish_checkpoint(folder.begin_checkpoint(1), RunState(step=1), keep=9)
    (checkpoint / "model").mkdir()
    for model, date in ((folder.model, first), (checkpoint / "model", first), (tmp_path / "other", later)):
        assert with_date(config, [str(model)], today=later).data.date == date
    # a run that began before there was this key takes the day on which it is first resumed
    (tmp_path / "run" / "config.yaml").write_text(resolved_yaml(config).replace("  date: null\n", ""))
    assert with_date(config, today=later).data.date == later
    (tmp_path / "run" / "config.yaml").write_text("data: {date: 2026-01-02")  # damaged
    assert with_date(config, today=later).data.date == later
    (tmp_path / "run" / "config.resumed.yaml").write_text(resolved_yaml(began))
    assert with_date(config, today=later).data.date == first


def test_on_a_bare_node_the_day_of_a_run_is_that_in_its_mirror(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    mirrored = {"mirror": f"file://{tmp_path}/far", "every": 1}
    config = make_config(Path("x/model"), run={"dir": str(tmp_path / "bare")}, checkpoint=mirrored)
    first, later = datetime.date(2026, 1, 2), datetime.date(2026, 3, 4)
    assert with_date(config, today=later).data.date == later
    (tmp_path / "far" / "config.yaml").write_text(resolved_yaml(with_date(config, today=first)))
    assert with_date(config, today=later).data.date == first
    assert not (tmp_path / "bare").exists()


def test_the_best_step_has_a_value() -> None:
    evaluations = {2: {"eval/t/avg@1": math.nan}, 4: {"eval/t/avg@1": 0.2}, 6: {}, 8: {"eval/t/avg@1": 0.1}}
    assert best_step(evaluations, "eval/t/avg@1") == 4
    assert best_step({2: {"eval/t/avg@1": math.nan}}, "eval/t/avg@1") is None
