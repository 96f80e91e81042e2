"""The readers of a run folder, the page made from it, and the rollouts in the terminal."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import os
import re
import shutil
import subprocess
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from moving_picture import moving_picture
from worlds import make_config, make_groups

from rlhf import show
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import flat_keys, validated
from rlhf.log.patient_files import PatientFiles
from rlhf.log.sinks import JsonlSink, table_of_responses
from rlhf.report import __main__ as report
from rlhf.report import curve
from rlhf.report.page import write_page
from rlhf.report.run_files import RunFiles, read_groups, read_run, sample_groups
from rlhf.report.settings import differing_keys, over_seeds
from rlhf.run.folder import RunFolder
from rlhf.run.model_card import model_card
from rlhf.run.rollout_log import rollout_rows
from rlhf.run.state import RunState
from rlhf.types import RolloutGroup

HOSTILE = "</script><img src=x onerror=boom()>\x1b[2J\u202e"


CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 17 + 25?"})


def write_run(
    path: Path,
    *,
    steps: int = 4,
    text: str = "an answer",
    prompt: Mapping[str, Any] = MappingProxyType({}),
    sample: Mapping[str, Any] = MappingProxyType({}),
    metrics: Mapping[str, float] = MappingProxyType({}),
    **sections: Any,
) -> Path:
    """A run folder as the trainer writes it: 2 groups of 4 responses in each step, evaluations at its start and end.

    Args:
        prompt, sample: fields of all prompts and graded responses. metrics: further ones of each step.
    """
    config = make_config(path.parent / "model", **sections)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(path), "steps": steps})})
    folder = RunFolder(path, resume=False)
    folder.create(config)
    files = PatientFiles(print)
    log = JsonlSink(folder.metrics, files)
    log.log(0, {"eval/test/avg@1": 0.25})
    for step in range(1, steps + 1):
        values = {"reward/mean": step / 10, "learner/lr": config.learner.optimizer.lr, "time/step": 1.0}
        log.log(step, values | {"time/update": 0.5, "time/sampling": 0.25, "policy/entropy": 1.0} | metrics)
        groups = make_groups(groups=2, samples=4, vocabulary=9, longest=20, seed=step)
        samples = [tuple(dataclasses.replace(s, text=text, **sample) for s in group.samples) for group in groups]
        prompts = [dataclasses.replace(group.prompt, **prompt) for group in groups]
        groups = [RolloutGroup(*parts) for parts in zip(prompts, samples, strict=True)]
        kept = {"tokens": ["2", "+"], "token_advantages": [0.5, -0.25], "token_differences": [0.0, 0.1]}
        rows = rollout_rows(step, groups, np.linspace(-1, 1, 8).tolist())
        folder.write_rollouts(step, [row | (kept if config.logging.token_values else {}) for row in rows], files)
    log.log(steps, {"eval/test/avg@1": 0.75, "eval/test/avg@1/low": 0.7, "eval/test/avg@1/high": 0.8})
    return path


def data_of(page: str, name: str) -> Any:
    (packed,) = re.findall(f'id="{name}-data">([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


# --- the readers ---


def test_a_run_is_read_as_its_program_wrote_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3, 4]
    assert run.rows[-1]["eval/test/avg@1"] == 0.75  # in the row of its step
    assert run.rows[-1]["reward/mean"] == 0.4
    assert run.config["run.steps"] == 4
    assert run.program_config is not None
    assert (run.program_config.program, run.finished) == ("grpo", False)
    groups = [group for file in run.rollout_files().values() for group in read_groups(file)]
    assert [[row["sample"] for row in group] for group in groups] == [[0, 1, 2, 3]] * 8


def test_lines_that_a_running_program_has_half_written_are_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    for file in (path / "metrics.jsonl", path / "rollouts/step-000004.jsonl"):
        file.write_text(file.read_text()[:-10])
    run = read_run(path)
    assert run.rows[-1]["step"] == 4
    assert "eval/test/avg@1" not in run.rows[-1]
    assert [len(group) for group in read_groups(run.rollout_files()[4])] == [4, 3]


def test_a_folder_without_a_run_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a run folder.*\brun\.dir\b"):
        read_run(tmp_path)


def test_the_config_of_a_resumed_run_is_the_one_that_is_shown(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    text = (path / "config.yaml").read_text()
    (path / "config.resumed.yaml").write_text(text.replace("steps: 4", "steps: 9"))
    assert read_run(path).config["run.steps"] == 9


def test_only_keys_that_differ_are_named_and_not_the_folder_of_the_run(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, algo={"kl_estimator": name})) for name in ("k1", "k3")]
    assert differing_keys([run.config for run in runs]) == ["algo.kl_estimator"]


def test_of_a_long_run_the_page_has_every_kth_step(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=40))
    size = sum(file.stat().st_size for file in run.rollout_files().values())
    everything, every = sample_groups(run, size)
    assert (len(everything), every) == (80, 1)
    some, every = sample_groups(run, -(-size // 4))
    assert every == 4
    assert [group[0]["step"] for group in some] == [step for step in range(1, 41, 4) for _ in range(2)]
    assert {len(group) for group in some} == {4}


def test_a_text_that_is_no_valid_unicode_is_shown_escaped_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = read_run(write_run(tmp_path / "run", text="a \ud800 \U0001f600"))
    assert "a \ud800 \U0001f600" in data_of(write_page([run]), "rollouts")["texts"]
    assert "\\ud800" in shown(run, capsys)
    row = next(iter(read_groups(run.rollout_files()[1])))[0]
    columns, (cells,) = table_of_responses([row])
    assert cells[columns.index("text")] == "a \\ud800 \U0001f600"  # in the tables of trackers


# --- the page ---


def test_the_page_holds_the_curves_the_rollouts_and_what_differs(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, algo={"kl_estimator": name})) for name in ("k1", "k3")]
    page = write_page(runs)
    metrics, rollouts = data_of(page, "metrics"), data_of(page, "rollouts")
    assert [run["name"] for run in metrics["runs"]] == ["k1", "k3"]
    assert metrics["settings"][0]["series"]["reward/mean"] == [None, 0.1, 0.2, 0.3, 0.4]
    assert metrics["runs"][0]["phases"] == {"update": 2.0, "sampling": 1.0}
    assert metrics["differing"] == ["algo.kl_estimator"]
    shown = [name for section in metrics["sections"] for panel in section["panels"] for name in panel["metrics"]]
    bounds = {"eval/test/avg@1/low", "eval/test/avg@1/high"}
    assert set(shown) == set(runs[0].metrics) - bounds  # every metric has a chart
    columns = rollouts["columns"]
    assert {name: len(column) for name, column in columns.items()} == dict.fromkeys(columns, 2 * 4 * 8)
    assert rollouts["texts"][columns["text"][0]] == "an answer"
    assert columns["advantage"][:8] == pytest.approx(np.linspace(-1, 1, 8), abs=1e-5)
    assert rollouts["every"] == [1, 1]


def test_runs_that_differ_in_their_seed_alone_are_one_line_with_the_mean_and_an_interval(tmp_path: Path) -> None:
    rewards = {"a0": 0.2, "a1": 0.4, "a2": 0.9, "alone": 0.5}
    for seed, (name, reward) in enumerate(rewards.items()):
        changed = {"algo": {"kl_coef": 0.1}} if name == "alone" else {}
        write_run(tmp_path / name, run={"seed": seed}, metrics={"reward/mean": reward}, **changed)
    short = tmp_path / "a2/metrics.jsonl"  # this seed has two steps so far
    short.write_text("".join(short.read_text().splitlines(keepends=True)[:3]))
    metrics = data_of(write_page([read_run(tmp_path / name) for name in rewards]), "metrics")
    seeds, alone = metrics["settings"]
    assert (seeds["name"], seeds["runs"], seeds["seeds"], seeds["shared"]) == ("a0 and 2 more", [0, 1, 2], [0, 1, 2], 2)
    assert seeds["series"]["reward/mean"] == [None, 0.5, 0.5, 0.3, 0.3]
    assert seeds["bands"]["reward/mean"] == [[None, 0.2, 0.2, 0.2, 0.2], [None, 0.9, 0.9, 0.4, 0.4]]
    assert "eval/test/avg@1/low" not in seeds["series"]  # the band takes the place of each run's own interval
    assert (alone["name"], alone["runs"], alone["bands"]) == ("alone", [3], {})
    assert alone["series"]["eval/test/avg@1/low"][-1] == 0.7
    assert metrics["differing"] == ["algo.kl_coef"]
    assert not {"run.seed", "run.dir", "algo.kl_coef"} & set(metrics["changed"])


def test_the_interval_over_many_seeds_is_narrower_than_their_range() -> None:
    values = np.array([[0.0], [1.0], [2.0], [3.0], [4.0], [np.nan]])
    mean, low, high = over_seeds(values)
    assert mean.tolist() == [2.0]
    assert 0 < low[0] < 1.5 < 2.5 < high[0] < 4


def test_the_page_of_several_runs_replaces_no_page_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write_run(tmp_path / name, algo={"kl_estimator": name})) for name in ("k1", "k3")]
    report.main([paths[0], f"{paths[0]}/"])
    own = (tmp_path / "k1/report.html").read_text()
    report.main(paths)
    assert capsys.readouterr().out.splitlines()[1].startswith(f"{tmp_path}/report-k1-k3.html: ")
    assert (tmp_path / "k1/report.html").read_text() == own
    assert "k1, k3" in (tmp_path / "report-k1-k3.html").read_text()
    many = [dataclasses.replace(read_run(paths[0]), path=tmp_path / f"{'x' * 20}{n}") for n in range(20)]
    assert len(report.default_output(many).name) < 100
    assert report.default_output(many) != report.default_output([*many[:-1], many[0]])
    assert report.default_output(many) != report.default_output(many[:19])


def test_report_card_and_show_begin_with_the_keys_that_differ_from_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = {"parts": [{"name": "math", "weight": 0.5}, {"name": "format", "weight": 1.0}]}
    path = write_run(tmp_path / "run", reward=reward, learner={"optimizer": {"lr": 1e-6, "betas": [0.9, 0.99]}})
    run = read_run(path)
    show.main([str(path), "--config"])
    printed = capsys.readouterr().out
    changed = yaml.safe_load(printed)
    assert changed["reward"]["parts"] == [{"name": "math", "weight": 0.5}, {"name": "format"}]  # 1.0 is the default
    assert changed["learner"]["optimizer"] == {"betas": [0.9, 0.99]}  # the default of the rate was given
    assert "null" not in printed
    assert validated(GRPOConfig, changed) == run.program_config
    assert f"of rlhf.grpo have defaults; all are in {path}/config.yaml" in printed
    page = data_of(write_page([run]), "metrics")
    assert page["changed"] == list(flat_keys(changed))
    card = model_card(RunState(step=4, program="grpo", config=run.values))
    first, everything = re.findall(r"```yaml\n(.*?)```", card, flags=re.DOTALL)
    assert yaml.safe_load(first) == changed
    assert yaml.safe_load(everything)["algo"]["teacher"] is None
    assert card.index("```yaml") < card.index("## Use") < card.index("<details>")


def test_of_a_config_of_another_version_every_value_that_is_not_null_counts_as_changed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["algo"]["of_old"] = {"a": None, "b": 1}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    run = read_run(path)
    assert run.changed["algo"]["of_old"] == {"b": 1}
    assert "teacher" not in run.changed["algo"]
    assert data_of(write_page([run]), "metrics")["runs"][0]["program"] is None


def test_the_page_has_the_whole_conversation_and_no_answers_where_the_task_has_none(tmp_path: Path) -> None:
    page = write_page([read_run(write_run(tmp_path / "run", prompt={"messages": CHAT, "answer": ""}))])
    texts, columns = (data_of(page, "rollouts")[key] for key in ("texts", "columns"))
    assert {texts[i] for i in columns["conversation"]} == {"system: Be brief.\n\nuser: What is 17 + 25?"}
    assert {texts[i] for i in columns["prompt"]} == {"What is 17 + 25?"}
    assert {texts[i] for i in columns["answer"]} == {""}
    assert set(columns["no_answer"]) == {False}
    asked = write_run(tmp_path / "asked", sample={"status": "no_answer"})
    assert set(data_of(write_page([read_run(asked)]), "rollouts")["columns"]["no_answer"]) == {True}


def test_the_page_marks_what_is_outside_of_its_healthy_range_and_evaluations_on_training_data(tmp_path: Path) -> None:
    whole = {"eval/test/in_training_fraction": 1.0, "eval/other/in_training_fraction": 0.9}
    runs = [
        read_run(write_run(tmp_path / name, metrics={"rollout/stopped_fraction": stopped, **shared}))
        for name, stopped, shared in (("cut", 0.35, {}), ("whole", 0.99, whole))
    ]
    page = write_page(runs)
    assert "<title>cut, whole, evaluated on its training data (test)</title>" in page
    assert "<h1>rlhf report: whole, evaluated on its training data (test)</h1>" in page
    metrics = data_of(page, "metrics")
    assert [run["findings"] for run in metrics["runs"]] == [[], []]
    outside = {"metric": "rollout/stopped_fraction", "value": 0.35, "healthy": "above 0.9"}
    assert [run["outside"] for run in metrics["runs"]] == [[outside], []]
    panels = {panel["title"]: panel for section in metrics["sections"] for panel in section["panels"]}
    marked = panels["Responses that stopped"]["healthy"]
    assert marked == {"rollout/stopped_fraction": {"low": 0.9, "high": None, "words": "above 0.9"}}
    assert panels["Entropy"]["healthy"] == {}


def test_charts_of_the_metric_say_which_one_it_is_and_call_nothing_outside_of_0_to_1_accuracy(tmp_path: Path) -> None:
    sets = {"data": {"eval": [{"path": "test.jsonl"}, {"path": "rated.jsonl", "metric": "own.py:f"}]}}
    sets |= {"reward": {"parts": ["format", "math", "own.py:f"]}}
    values = {
        "eval/test/avg@1": 0.5,
        "eval/rated/avg@1": 0.9,
        "eval/rated/part/math": 0.5,
        "eval/test/part/format": 1.0,
    }

    def charts(*runs: Path) -> dict[str, list[str]]:
        sections = {each["title"]: each for each in data_of(write_page([*map(read_run, runs)]), "metrics")["sections"]}
        return {panel["title"]: panel["metrics"] for panel in sections["Evaluation"]["panels"]}

    run = write_run(tmp_path / "a", metrics=values, **sets)
    assert charts(run) == {
        "Accuracy (math)": ["eval/test/avg@1"],
        "Accuracy (own.py:f)": ["eval/rated/avg@1"],
        "Other parts of the reward": ["eval/rated/part/math", "eval/test/part/format"],
    }
    left = write_run(tmp_path / "b", metrics=values | {"eval/rated/outside_fraction": 0.1}, **sets)
    assert charts(run, left)["Accuracy (own.py:f) / own.py:f"] == ["eval/rated/avg@1"]


def test_nothing_in_the_page_is_loaded_from_elsewhere_and_no_text_of_a_run_is_html(tmp_path: Path) -> None:
    page = write_page([read_run(write_run(tmp_path / "run", text=HOSTILE))])
    assert "<img" not in page
    assert re.findall(r"""(?:src|href)=["'](?!#)[^"']*""", page) == []
    assert "default-src 'none'" in page
    assert data_of(page, "rollouts")["texts"].count(HOSTILE) == 1


CLICKS = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
const tell = (what) => document.body.append(Object.assign(document.createElement("output"), { textContent: what }));
const filled = setInterval(async () => {
  if (!document.body.dataset.ready) return;
  clearInterval(filled);
  document.querySelector(".plot").scrollIntoView();
  while (!document.querySelector(".plot svg .scatterlayer path")) await new Promise((done) => setTimeout(done, 50));
  tell(`all ${$("count").textContent}`);
  $("filters").step_min.value = 2;
  $("filters").reward_min.value = 0.5;
  $("filters").run.value = "1";
  filter();
  tell(`filtered ${$("count").textContent}`);
  document.querySelector("#rows button").click();
  tell(`head ${[...document.querySelectorAll("#rows th")].map((cell) => cell.textContent)}`);
  tell(`notice ${$("findings").textContent}`);
  document.querySelector("#responses .plot").scrollIntoView();
  while (!document.querySelector("#responses .shapelayer path")) await new Promise((done) => setTimeout(done, 50));
  tell(`bands ${document.querySelectorAll("#responses .shapelayer path").length}`);
  tell(`group ${$("samples").children.length} of ${$("group-title").textContent}`);
  for (const shade of ["token_advantages", "token_differences"]) {
    $("shade").value = shade;
    $("shade").dispatchEvent(new Event("change"));
    const tokens = document.querySelectorAll("#samples article:first-child .token");
    tell(`${shade} ${[...tokens].map((token) => token.title)}`);
  }
  $("group").close();
  $("filters").reset();
  await new Promise((done) => setTimeout(done, 50));
  tell(`cleared ${$("count").textContent}`);
  tell(`errors ${errors.join("; ")}.`);
}, 50);
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")
def test_a_browser_draws_the_charts_filters_the_rollouts_and_opens_a_group_without_an_error(tmp_path: Path) -> None:
    cut_off = {"rollout/stopped_fraction": 0.35}
    runs = [
        read_run(write_run(tmp_path / name, text=HOSTILE, logging={"token_values": True}, metrics=cut_off))
        for name in ("one", "two")
    ]
    rows = [row for file in runs[1].rollout_files().values() for group in read_groups(file) for row in group]
    file = tmp_path / "report.html"
    file.write_text(write_page(runs).replace("<body>", f"<body>{CLICKS}"), errors="replace")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=60000", "--dump-dom"]
    done = subprocess.run(["chromium", *options, file], capture_output=True, text=True, timeout=300, check=True)
    told = dict(line.split(" ", 1) for line in re.findall(r"<output>([^<]*)</output>", done.stdout))
    assert told["all"] == told["cleared"] == "64 of 64 rollouts, 1 to 50"
    expected = sum(row["step"] >= 2 and row["reward"] is not None and row["reward"] >= 0.5 for row in rows)
    assert told["filtered"] == f"{expected} of 64 rollouts, 1 to {expected}"
    assert (
        told["head"] == "run,step,prompt,response,gold,reward,advantage,tokens,status,end"
    )  # no reward read an answer
    assert "rollout/stopped_fraction0.35above 0.9" in told["notice"]
    assert "No rule found a problem." in told["notice"]
    assert told["bands"] == "1"
    assert told["group"].startswith("4 of two step ")
    assert told["token_advantages"] == "token advantages: 0.5,token advantages: -0.25"
    assert told["token_differences"] == "token differences: 0,token differences: 0.1"
    assert told["errors"] == "."


# --- the terminal ---


def shown(run: RunFiles, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    show.main([str(run.path), *arguments])
    return capsys.readouterr().out


def test_groups_are_shown_newest_first_and_control_characters_are_spelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = read_run(write_run(tmp_path / "run", text=HOSTILE))
    text = shown(run, capsys, "-n", "3")
    assert re.findall(r"─ step (\d+), ", text) == ["4", "4", "3"]
    assert text.count("sample ") == 12
    assert "onerror=boom()>\\u001b[2J\\u202e" in text
    assert shown(run, capsys, "--step", "2", "-n", "9").count("─ step 2, ") == 2


def test_no_field_of_a_rollout_reaches_the_terminal_with_its_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    controls = "\x07\x1b[2J\x7f\x85\x9b1m\u200e\u202e\u2066\u2069\ufeff\U000e0041\r"

    def hostile(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: hostile(each) for name, each in value.items()}
        if isinstance(value, list):
            return [*map(hostile, value)]
        return f"{value}{controls}" if isinstance(value, str) and value != "assistant" else value

    call = {"function": {"name": "calculator", "arguments": '{"a": 1}'}}
    more = {
        "facts": {"calls": {f"call{controls}": 1}}, "reward_parts": {f"math{controls}": 1.0, "more": 0.5},
        "context": [{"role": "system", "content": "Be brief."}],
        "turns": [
            {"role": "assistant", "content": "text", "reasoning_content": "thought", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": "1"},
        ],
    }  # fmt: skip
    run = read_run(write_run(tmp_path / "run", steps=1))
    (file,) = run.rollout_files().values()
    rows = [json.loads(line) | more for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps(hostile(row))}\n" for row in rows))
    text = shown(run, capsys, "-n", "9")
    assert text.count("\\u001b") > 8 * 10  # in ten fields of each response
    assert sorted({char for char in text if unicodedata.category(char)[0] == "C"} - {"\n"}) == []


def test_the_conversation_and_the_parts_of_the_reward_are_shown_and_answers_where_there_are_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    parts = {"reward": 1.5, "reward_parts": {"helpful": 1.0, "length": 0.5, "mine": None}}
    chat = read_run(write_run(tmp_path / "chat", prompt={"messages": CHAT, "answer": ""}, sample=parts))
    text = shown(chat, capsys, "-n", "1", "--contains", "Be brief")
    assert "│ system: Be brief." in text
    assert "│ user: What is 17 + 25?" in text
    assert "reward 1.5 (helpful 1, length 0.5, mine none), advantage" in text
    assert "gold answer" not in text
    assert "extracted" not in text
    one_part = {"reward": 1.0, "reward_parts": {"math": 1.0}, "extracted": "42"}
    asked = shown(read_run(write_run(tmp_path / "asked", sample=one_part)), capsys, "-n", "1")
    assert "gold answer: 0" in asked
    assert "reward 1, advantage" in asked
    assert "tokens, extracted 42" in asked
    silent = shown(read_run(write_run(tmp_path / "silent", sample={"status": "no_answer"})), capsys, "-n", "1")
    assert "tokens, extracted nothing" in silent


TURNS = (
    {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "a tool",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 17}'}}],
    },
    {"role": "tool", "name": "add", "content": HOSTILE},
    {"role": "assistant", "content": "It is 42."},
)


def with_turns(path: Path) -> Path:
    """A run whose rollouts have turns."""
    folder = write_run(path)
    for file in read_run(folder).rollout_files().values():
        rows = [{**json.loads(line), "turns": TURNS, "text": "It is 42."} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_turns_are_shown_as_thoughts_texts_calls_and_what_the_environment_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = read_run(with_turns(tmp_path / "run"))
    lines = [line.strip("│ ") for line in shown(run, capsys, "-n", "1", "--contains", '"a": 17').splitlines()]
    start = lines.index("a tool")
    answer = "tool add: </script><img src=x onerror=boom()>\\u001b[2J\\u202e"
    assert lines[start : start + 5] == ["a tool", "Let me see.", '-> add({"a": 17})', answer, "It is 42."]
    rollouts = data_of(write_page([run]), "rollouts")
    (first, *_) = rollouts["columns"]["blocks"]
    assert [kind for kind, _ in first] == ["thought", "text", "call", "tool", "text"]
    assert rollouts["texts"][first[3][1]] == f"add: {HOSTILE}"


@pytest.mark.parametrize(
    ("text", "in_thought", "blocks"),
    [
        ("<think>17 + 25</think>It is 42.", False, [("thought", "<think>17 + 25</think>"), ("text", "It is 42.")]),
        ("17 + 25</think>It is 42.", True, [("thought", "17 + 25</think>"), ("text", "It is 42.")]),
        ("17 + 25", True, [("thought", "17 + 25")]),
        ("<|channel>thought\n17 + 25", False, [("thought", "<|channel>thought\n17 + 25")]),
        ("It is 42.", False, None),
    ],
)
def test_a_response_is_shown_as_its_thought_and_its_answer(
    tmp_path: Path, text: str, in_thought: bool, blocks: list[tuple[str, str]] | None
) -> None:
    run = read_run(write_run(tmp_path / "run", text=text, prompt={"in_thought": in_thought}))
    rollouts = data_of(write_page([run]), "rollouts")
    shown, texts = rollouts["columns"]["blocks"][0], rollouts["texts"]
    assert shown == (None if blocks is None else [[kind, texts.index(part)] for kind, part in blocks])
    assert texts[rollouts["columns"]["text"][0]] == (blocks[-1][1] if blocks else text)


def test_a_filter_that_nothing_fits_and_a_step_that_is_not_there_say_which_steps_there_are(tmp_path: Path) -> None:
    path = str(write_run(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"no group passes the filters.*\b1 to 4\b"):
        show.main([path, "--contains", "nowhere"])
    with pytest.raises(ValueError, match=r"--step 9: .*\b1 to 4\b"):
        show.main([path, "--step", "9"])


def test_a_pipe_among_the_rollouts_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    os.mkfifo(tmp_path / "rollouts" / "step-1.jsonl")
    assert RunFiles(tmp_path, tmp_path / "config.yaml", {}, []).rollout_files() == {}


# --- the curve ---


def test_the_curve_shows_the_evaluation_before_and_after_and_the_reward_of_each_step(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", data={"eval": "test.jsonl"})
    report.main([str(path), "--curve", str(tmp_path / "curve.svg")])
    svg = ElementTree.parse(tmp_path / "curve.svg").getroot()
    texts = [text.text for text in svg.findall(".//{*}text")]
    assert [text for text in texts if text and ":" in text] == [
        "accuracy (math): 0.25 → 0.75",
        "reward in training: 0.10 → 0.40",
    ]
    evaluation, reward = (
        [*map(float, re.split("[ ,]", line.get("points", "")))] for line in svg.findall(".//{*}polyline")
    )
    assert len(evaluation) == 4
    assert len(reward) == 8
    assert evaluation[0] < reward[0]  # step 0 is before step 1
    assert evaluation[2] == reward[-2]  # both end at the last step
    assert evaluation[1] - evaluation[3] == pytest.approx(curve.PLOT_HEIGHT / 2, abs=0.1)
    assert curve.draw_curve([read_run(path)]) == (tmp_path / "curve.svg").read_text()


def test_the_moving_picture_draws_the_curve_next_to_responses_of_the_first_and_the_last_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", text=HOSTILE, data={"eval": "test.jsonl"})
    svg = ElementTree.fromstring(moving_picture(run))
    texts = [text.text or "" for text in svg.findall(".//{*}text")]
    assert [text for text in texts if text.startswith("step ")] == ["step 1", "step 4"]
    assert any("</script>" in text for text in texts)
    assert not svg.findall(".//{*}script") + svg.findall(".//{*}img")
    moving = {animation.get("attributeName") for animation in svg.findall(".//{*}polyline/{*}animate")}
    assert moving == {"stroke-dashoffset"}
    assert {line.get("stroke-dashoffset") for line in svg.findall(".//{*}polyline")} == {None}


def test_a_reward_outside_of_0_to_1_is_drawn_between_its_own_bounds() -> None:
    line = curve.Line("reward", [(1, -3.0), (2, 1.0), (3, 5.0)])
    assert [line.height(value) for _, value in line.points] == [0.0, 0.5, 1.0]
    assert [curve.Line("accuracy", [(0, 0.2), (1, 0.9)]).height(value) for value in (0.2, 0.9)] == [0.2, 0.9]
    assert curve.Line("constant", [(0, 2.0), (1, 2.0)]).height(2.0) == 0.5


def test_the_curves_of_several_runs_carry_their_names_and_no_reward(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, data={"eval": "test.jsonl"})) for name in ("a<b", "c")]
    labels = re.findall(r"<text [^>]*>(.*: .*)</text>", curve.draw_curve(runs))
    assert labels == ["a&lt;b, accuracy (math): 0.25 → 0.75", "c, accuracy (math): 0.25 → 0.75"]
    nothing = dataclasses.replace(runs[0], rows=[{"step": 1, "train/loss": 2.0}])
    with pytest.raises(ValueError, match=r"--curve: .*a<b: there is no evaluation and no reward to draw"):
        curve.draw_curve([nothing])


def test_over_minutes_a_run_that_takes_half_of_the_time_ends_in_the_middle(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", data={"eval": "test.jsonl"}))
    runs = [
        dataclasses.replace(run, rows=[{**row, "time": 1e9 + row["step"] * seconds} for row in run.rows])
        for seconds in (60, 30)
    ]
    svg = curve.draw_curve(runs, minutes=True)
    ends = [float(points.split()[-1].split(",")[0]) for points in re.findall(r'points="([^"]*)"', svg)]
    assert ends == [curve.WIDTH - curve.RIGHT, (curve.WIDTH - curve.RIGHT + curve.LEFT) / 2]
    assert "minutes of training" in svg


@pytest.mark.parametrize(("last", "between"), [(1, 1), (6, 1), (30, 5), (80, 20), (500, 100), (1000, 200)])
def test_the_axis_of_steps_has_round_numbers(last: int, between: int) -> None:
    assert curve.step_between_ticks(last) == between
