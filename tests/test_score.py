"""The program that grades a file: what it writes, what it prints, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf import score
from rlhf.config.cli import run_program

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parent / "fixtures"
BY_RESPONSE = "def by_response(response, *, answer, columns, metadata):"


def run(arguments: list[str]) -> int:
    """The exit status of the program."""
    return run_program(lambda: score.main(arguments))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_row_comes_back_in_order_with_score_answer_and_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"id": "a", "response": r"\boxed{5}", "ground_truth": "5"},
        {"id": "b", "response": "The answer is 6.", "ground_truth": "5"},
        {"id": "c", "response": "I would have to think about this one for much longer.", "ground_truth": "5"},
        {"id": "d", "response": r"\boxed{5}", "ground_truth": ""},
        {"id": "e", "response": "so 5 in all", "ground_truth": "2 + 3 = 5\n#### 5"},
        {"id": "f", "response": None, "ground_truth": 5},
        {"id": "h", "response": r"\boxed{5}", "ground_truth": ["4", 5]},
        {"id": "g", "response": "a \ud800 lone surrogate \\boxed{5}", "ground_truth": "5"},
    ]
    output = tmp_path / "out.jsonl"
    assert run([str(write(tmp_path / "in.jsonl", rows)), "--output", str(output), "--workers", "1"]) == 0
    graded = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["id"], row["score"], row["extracted"], row["status"]) for row in graded] == [
        ("a", 1.0, "5", "ok"),
        ("b", 0.0, "6", "ok"),
        ("c", 0.0, "", "no_answer"),
        ("d", None, "", "bad_gold"),
        ("e", 1.0, "5", "ok"),
        ("f", 0.0, "", "no_answer"),
        ("h", 1.0, "5", "ok"),
        ("g", 1.0, "5", "ok"),
    ]
    printed = capsys.readouterr().out
    assert "accuracy  0.5714 over 7 rows, without 1 that cannot be graded" in printed
    assert "ok 5, no_answer 2, bad_gold 1" in printed
    assert "answers/s" in printed


def test_rows_that_nobody_judged_or_whose_function_failed_are_not_counted_as_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "judge.py").write_text(
        "def judge(completions, **_): return [None if text == 'skip' else float(text) for text in completions]\n"
    )
    arguments = ["--reward", f"{tmp_path}/judge.py:judge", "--workers", "1"]
    rows = write(tmp_path / "in.jsonl", [{"response": text} for text in ("1", "0", "skip", "skip", "raise")])
    assert run([str(rows), *arguments]) == 0
    printed = capsys.readouterr()
    assert "accuracy  0.5000 over 2 rows, without 3 that cannot be graded" in printed.out
    assert "not_judged 2" in printed.out
    why = "warning: {}: 3 of 5 rows have no grade (2 x not_judged, 1 x failed), the first is row 3. They do not count"
    assert why.format(rows) in printed.err
    write(rows, [{"response": "1.25"}] * 98 + [{"response": "skip"}] * 2)  # 2%
    assert run([str(rows), *arguments]) == 0
    printed = capsys.readouterr()
    assert f"{tmp_path}/judge.py:judge  1.2500 over 98 rows" in printed.out
    assert "warning" not in printed.err
    write(rows, [{"response": "skip"}] * 2)
    assert run([str(rows), *arguments]) == 1
    printed = capsys.readouterr()
    assert "0.0000" not in printed.out
    assert "2 of 2 rows have no grade (2 x not_judged), the first is row 1. Nothing was measured" in printed.err


def test_another_reward_and_other_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    output = tmp_path / "out.jsonl"
    file = write(tmp_path / "in.jsonl", [{"text": "four", "gold": "x"}])
    keys = ["--response-key", "text", "--answer-key", "gold", "--output", str(output)]
    assert run([str(file), *keys, "--reward", "hostile_rewards:length", "--workers", "1"]) == 0
    assert json.loads(output.read_text())["score"] == 4.0
    part = "{name: 'hostile_rewards:length', scale: 2.0, network: true}"
    assert run([str(file), *keys, "--reward", part, "--workers", "1"]) == 0
    assert json.loads(output.read_text())["score"] == 8.0


def test_strict_grading_of_a_file_knows_the_prompt_of_a_row(tmp_path: Path) -> None:
    rows = [
        {"problem": "Expand $(x+1)x$.", "response": r"\boxed{x(x+1)}", "ground_truth": "x^2+x"},
        {"response": r"\boxed{x(x+1)}", "ground_truth": "x^2+x"},
        {"prompt": "Go on.<think>\n", "response": r"\boxed{5}", "ground_truth": "5"},
        {"prompt": "Go on.", "in_thought": True, "response": r"\boxed{5}", "ground_truth": "5"},  # of rollouts/
        {"messages": [{"role": "user", "content": "Write $0.5$ as a fraction."}], "response": r"\boxed{0.5}",
         "ground_truth": r"\frac12"},
    ]  # fmt: skip
    output = tmp_path / "out.jsonl"
    assert run([str(write(tmp_path / "in.jsonl", rows)), "--strict", "--output", str(output), "--workers", "1"]) == 0
    assert [json.loads(line)["score"] for line in output.read_text().splitlines()] == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_a_built_in_reward_that_fails_on_every_row_is_exit_status_1_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costly = r"\boxed{\sum_{a=1}^{2000}\sum_{b=1}^{2000}ab}"
    file = write(tmp_path / "in.jsonl", [{"response": costly, "ground_truth": "7"}])
    assert run([str(file), "--workers", "1", "--cpu-seconds", "0.01"]) == 1
    assert capsys.readouterr().err.startswith("error: reward math: 1 of 1 calls failed\n  1 x timeout: ")


def fixture_line(code: str) -> str:
    """`file:line` of this code among the rewards of the fixtures."""
    file = FIXTURES / "hostile_rewards.py"
    return f"{file}:{file.read_text().splitlines().index(code) + 1}"


def score_by(reward: str, responses: list[str], tmp_path: Path) -> int:
    rows = [{"response": response, "ground_truth": "x"} for response in responses]
    file = write(tmp_path / "in.jsonl", rows)
    return run([str(file), "--reward", f"hostile_rewards:{reward}", "--workers", "1"])


def test_a_reward_of_which_every_call_fails_is_exit_status_1_with_each_error_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    assert score_by("fails_in_its_helper", ["x", "{}", "{}", "x", "{}"], tmp_path) == 1
    location = fixture_line('    return json.loads(text)["value"]')
    assert capsys.readouterr().err.splitlines() == [
        "error: reward hostile_rewards:fails_in_its_helper: 5 of 5 calls failed",
        f"  3 x {location}: KeyError: 'value'",
        f"  2 x {location}: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    ]


def test_a_reward_that_fails_sometimes_is_reported_with_its_errors_and_exit_status_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    assert score_by("by_response", ["raise", "fine", "nan", "crash", "fine"], tmp_path) == 0
    raises, defined = fixture_line('            raise KeyError("a key")'), fixture_line(BY_RESPONSE)
    *told, warning = capsys.readouterr().err.splitlines()
    assert "3 of 5 rows have no grade (2 x failed, 1 x died)" in warning
    assert told == [
        "reward hostile_rewards:by_response: 3 of 5 calls failed",
        f"  1 x {raises}: KeyError: 'a key'",
        f"  1 x {defined}: returned nan, no finite number",
        "  1 x died: the process died",
    ]


def test_what_a_reward_says_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = tmp_path / "rewards"
    rewards.mkdir()
    code = "def mine(response, **_):\n    raise ValueError('\\x1b[2J\\x1b]0;owned\\x07' + response)\n"
    (rewards / "mine.py").write_text(code)
    file = write(tmp_path / "in.jsonl", [{"response": "\x1b[31m", "ground_truth": "5"}])
    assert run([str(file), "--reward", f"{rewards / 'mine.py'}:mine", "--workers", "1"]) == 1
    printed = capsys.readouterr()
    assert "ValueError: \\u001b[2J\\u001b]0;owned\\u0007\\u001b[31m" in printed.err
    assert "\x1b" not in printed.out + printed.err


def test_a_reward_with_another_signature_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    assert score_by("takes_no_answer", ["x"], tmp_path) == 2  # before anything is graded
    assert capsys.readouterr().err == (
        "error: reward name='hostile_rewards:takes_no_answer': takes_no_answer(response) cannot be called: got an "
        "unexpected keyword argument 'answer'. It gets (response, answer=, columns=, metadata=); add **_ for what it "
        "ignores.\n"
    )


def test_a_reward_that_reads_no_answer_asks_for_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def mine(response, answer, **_):\n    return float(answer == '')\n")
    file = write(tmp_path / "in.jsonl", [{"response": "<think>a</think> b"}, {"response": "b b"}])
    for reward, headline in (
        ("{name: format, style: think}", "accuracy  0.5000"),
        ("{name: format, style: think, weight: -0.1}", "accuracy  0.5000"),  # as evaluations, before the weight
        ("{name: length, max_tokens: 3}", "length    0.0000"),
        ("repetition", "repetition  0.0000"),
        (f"{tmp_path / 'mine.py'}:mine", "accuracy  1.0000"),
    ):
        assert run([str(file), "--reward", reward, "--workers", "1"]) == 0
        printed = capsys.readouterr()
        assert f"{headline} over 2 rows" in printed.out
        note = f"{file}: no column 'ground_truth', so the reward gets answer=''. Set --answer-key.\n"
        assert printed.err == (note if "mine" in reward else "")
    for needing in (["--reward", "f1"], ["--reward", "repetition", "--answer-key", "gold"]):
        assert run([str(file), *needing]) == 2
        assert "in.jsonl:1: no text in column" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, [], "there is no such file"),
        ("{}\n", [], "no text in column 'response'; it has"),
        ('{"response": "x"}\n', [], "no text in column 'ground_truth'; it has response"),
        ('{"response": ["x"], "ground_truth": "5"}\n', [], "no text in column 'response'"),
        ('{"response": \n', [], "line 1 of"),
        ("", [], "the file is empty"),
        ('{"response": "x", "ground_truth": "5"}\n', ["--workers", "0"], "workers=0: "),
        ('{"response": "x", "ground_truth": "5"}\n', ["--reward", "maht"], " math?"),
        ('{"response": "x", "ground_truth": "5"}\n', ["--output", "/no/such/folder/out.jsonl"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, arguments: list[str], message: str
) -> None:
    file = tmp_path / "in.jsonl"
    if text is not None:
        file.write_text(text)
    assert run([str(file), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    program = (
        "import sys, rlhf.score, rlhf.config.reward\n"
        "heavy = {'torch', 'ray', 'vllm', 'deepspeed', 'sympy', 'math_verify', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import rlhf.rewards.scorer\n"
        "heavy = {'torch', 'ray', 'vllm', 'deepspeed', 'sympy', 'math_verify', 'mpmath'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
