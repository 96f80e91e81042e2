"""What a run prints: lines of 80 columns in a file, and a live view on a terminal, fed with the events of a run."""

from __future__ import annotations

import os
import re
import threading
import time
import unicodedata
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from waiting import eventually

from rlhf.config import printing
from rlhf.log import terminal
from rlhf.log.sinks import Details, evaluation_table, shown_reward
from rlhf.log.terminal import Terminal, duration

STEP = {  # as a run logs them
    "reward/mean": 0.8135, "policy/kl_k3": 0.00312, "rollout/response_length/mean": 1234.5678, "policy/entropy": 0.31,
    "learner/grad_norm": 0.42, "rollout/tokens_per_second": 123456.7, "time/step": 2.514,
}  # fmt: skip
RESPONSE = {
    "step": 1200, "prompt": "What is 3 + 4?", "text": "seven\x1b[2J \\boxed{7}", "reward": 1.0, "status": "ok",
    "finish_reason": "stop",
}  # fmt: skip


METRICS = ("avg@16", "avg@16/low", "avg@16/high", "pass@16", "maj@16", "response_length", "stopped_fraction")


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def in_file(**options: Any) -> tuple[Terminal, StringIO]:
    printed = StringIO()
    return Terminal(Console(file=printed, width=80), **{"total_steps": 10000, **options}), printed


def feed(run: Terminal) -> None:
    """The events of a run, in their order, with names and numbers as long as they get."""
    with run.stage("Ray"):
        pass
    with run.stage("weights of the learner"), run.stage("engine"):
        pass
    run.print("data some/long/path/to/a/file.jsonl: 16384 prompts, 3 left out as longer than 512 tokens, and so on")
    with run.phase("evaluation"):
        count = run.progress("problem", 512)
        for _ in range(512):
            count()
    run.evaluation(0, {f"eval/{name}/{metric}": 0.5 for name in ("gsm8k", "math") for metric in METRICS})
    for step in (1, 1200, 10000):
        with run.phase("sampling"):
            pass
        run.log(step, STEP, Details(responses=[RESPONSE, RESPONSE | {"reward": 0.0, "text": "eight"}]))
    run.warn("reward[0]: " + "returned [bold] something. " * 8)


def test_every_line_in_a_file_fits_80_columns_and_says_what_happened() -> None:
    run, printed = in_file()
    feed(run)
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not re.search(r"[\x00-\x08\x1b]", printed.getvalue())
    assert [line for line in lines if line.startswith("start:")] == [
        "start: Ray 0.0 s", "start: engine 0.0 s", "start: weights of the learner 0.0 s",
    ]  # fmt: skip
    first, *_ = [line for line in lines if line.startswith("step ")]
    assert first.startswith("step     1/10000  reward 0.814  kl 0.0031  length 1235  tok/s 123457  eta ")
    evaluated = [line for line in lines if line.startswith("eval at step 0  ")]
    assert [line.split("  ")[1] for line in evaluated] == ["gsm8k", "math"]
    assert not any("low" in line for line in evaluated)
    assert "warning: reward[0]: returned [bold] something." in printed.getvalue()


HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202e"


def test_no_control_sequence_of_data_or_of_a_reward_reaches_the_terminal() -> None:
    run, printed = in_file(title=f"runs/{HOSTILE}")
    run.print(f"data {HOSTILE}.jsonl: 4 prompts")
    run.print(f"prompt {HOSTILE}", wrap=False)
    run.warn(f"reward: ValueError: {HOSTILE}")
    run.evaluation(1, {f"eval/{HOSTILE}/avg@1": 0.5})
    responses = [RESPONSE | {"prompt": HOSTILE, "text": HOSTILE}]
    run.log(1, STEP, Details(responses=responses))
    Console(file=printed, width=80).print(run.view())
    table = evaluation_table("evaluation", {f"models/{HOSTILE}": {f"eval/{HOSTILE}/avg@1": 0.5}})
    Console(file=printed, width=80).print(table)
    shown = printed.getvalue()
    assert shown.count("\\u001b") >= 7
    assert [c for c in shown if c != "\n" and unicodedata.category(c)[0] == "C"] == []
    run.print("\u0645\u06cc\u200c\u0631\u0648\u0645")  # a word of Persian, in which a joiner belongs
    assert printed.getvalue().endswith("\u0645\u06cc\u200c\u0631\u0648\u0645\n")


def test_a_path_is_never_broken_and_text_that_is_shown_as_it_is_neither() -> None:
    run, printed = in_file()
    path = "/".join(["folder"] * 20)
    run.print(f"run folder: {path}")
    run.print("a prompt  with " + "x " * 100, wrap=False)
    assert printed.getvalue() == f"run folder:\n  {path}\na prompt  with {'x ' * 100}\n"


def test_who_waits_is_said_once_in_each_tenth_of_a_run_and_always_in_the_live_view() -> None:
    run, printed = in_file(total_steps=40)
    waits = "learner waits 62% (slow prompts): raise rollout.max_policy_lag"
    for step in range(1, 13):
        run.log(step, STEP)
        run.who_waits(waits)
    assert printed.getvalue().count(waits) == 3  # after steps 4, 8 and 12
    assert run.status()["waits"] == waits
    shown = StringIO()
    Console(file=shown, width=80).print(run.view())
    assert waits in shown.getvalue()


def test_the_remaining_time_is_that_of_the_steps_left_with_what_comes_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    run, _ = in_file(total_steps=10)
    clock.now += 1000  # neither the start-up nor the evaluation before the first step counts
    for seconds, left in ((3, 9 * 3), (5, 8 * 4)):
        clock.now += seconds
        run.log({3: 1, 5: 2}[seconds], STEP | {"time/step": 3.0})
        assert run.remaining_s() == left


def test_durations_are_written_in_the_unit_that_fits() -> None:
    assert [duration(s) for s in (0.4, 89, 91, 5399, 5401, 129599, 129601)] == [
        "0 s", "89 s", "2 min", "90 min", "1.5 h", "36.0 h", "1.5 d",
    ]  # fmt: skip


def test_a_long_evaluation_has_lines_of_its_own_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run, printed = in_file()
    with run.phase("evaluation"):
        count = run.progress("problem", 8)
        for _ in range(8):
            clock.now += terminal.PROGRESS_EVERY_S / 3
            count()
    assert printed.getvalue() == "problem 4/8\nproblem 8/8\n"


def test_before_the_first_step_a_file_gets_a_line_after_each_ten_seconds_of_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    for name, value in {"LOOK_S": 0.001, "_printed_at": 0.0, "_heartbeat_ended_at": 0.0}.items():
        monkeypatch.setattr(printing, name, value)
    run, printed = in_file(total_steps=9)
    with printing.heartbeat(lambda: "importing", run.print):  # what comes before the run does not count again
        clock.now += 5
    with run.live():
        with run.phase("start"), run.phase("engine"):
            clock.now += 4
            assert eventually(lambda: printed.getvalue() == "starting: engine 4 s\n")
            run.print("a line")
            clock.now += 7
        with run.phase("evaluation"):
            run.progress("problem", 8)()
            clock.now += 1
            assert eventually(lambda: "now: evaluation 1 s, problem 1/8\n" in printed.getvalue())
        run.log(1, STEP)
        with run.phase("sampling"):
            clock.now += 100
            time.sleep(0.02)
    assert len(printed.getvalue().splitlines()) == 4


def test_the_live_view_on_a_terminal_shows_stage_step_and_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(terminal, "REFRESHES_PER_S", 1000)
    Clock(monkeypatch)  # it stands still: a busy machine shows "1 s" first
    ours, theirs = os.openpty()
    shown = bytearray()

    def read() -> None:
        while chunk := os.read(ours, 65536):
            shown.extend(chunk)
            if b"the end" in chunk:
                return

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as file:
        run = Terminal(Console(file=file), total_steps=10000, warmup_steps=1300, title="runs/mine")
        with run.live():
            seen = 0

            def wait_for(*texts: str) -> None:
                nonlocal seen
                while not all(text in plain(shown[seen:]) for text in texts):
                    time.sleep(0.001)
                seen = len(shown)

            with run.stage("Ray"):
                wait_for("runs/mine  step 0/10000", "starting", "now     Ray 0 s")
            with run.phase("evaluation"):
                run.progress("problem", 512)()
                wait_for("now     evaluation 0 s, problem 1/512")
            feed(run)
            run.log(1200, STEP, Details(responses=[RESPONSE, RESPONSE | {"reward": 0.0, "text": "eight"}]))
            with run.phase("update"):
                wait_for(
                    "step 1200/10000", "eta ", "now     update 0 s, critic warm-up 1201/1300",
                    "last    reward 0.814  kl 0.0031  length 1235  tok/s 123457",
                    "eval at step 0  math", "step 1200, reward 1, ok, stop", "What is 3 + 4?",
                    "step 1200, reward 0, ok, stop",
                )  # fmt: skip
        run.print("the end")
        reader.join()
    os.close(ours)
    text = plain(shown)
    assert "start: Ray 0.0 s" in text  # the lines scroll above the view
    assert r"seven\u001b[2J \boxed{7}" in text  # a response cannot clear the screen
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")  # the cursor is back
    assert text.splitlines()[-1] == "the end"


def test_a_response_is_green_only_for_a_reward_above_0() -> None:
    shown = [shown_reward(reward) for reward in (None, -0.1, 0.0, 0.25)]
    assert shown == [("none", "red"), ("-0.1", "red"), ("0", "red"), ("0.25", "green")]


def plain(output: bytes | bytearray) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode(errors="replace"))
