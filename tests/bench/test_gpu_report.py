"""The report of a GPU: phases that fail, hang, or lack something hold up no other, and a second call goes on."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S

from benchmarks import gpu_report
from benchmarks.gpu_report import Phase


def options_for(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(output=folder, device="cpu", quick=True, only=None, load=0.0)


def benchmark(folder: Path, name: str, text: str) -> None:
    (folder / "benchmarks").mkdir(exist_ok=True)
    (folder / "benchmarks" / "__init__.py").touch()
    (folder / "benchmarks" / f"{name}.py").write_text(text)


WRITES = """
import json, pathlib, sys
result = {"title": "one", "rows": [{"a|b": "x|y", "n": 0.25}], "notes": ["a note"]}
(pathlib.Path(sys.argv[sys.argv.index("--output") + 1]) / "good.json").write_text(json.dumps(result))
"""


@pytest.mark.slow
def test_a_phase_that_fails_or_hangs_is_named_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    benchmark(tmp_path, "good", WRITES)
    benchmark(tmp_path, "broken", "raise SystemExit('no such device')")
    benchmark(tmp_path, "hangs", "import time; time.sleep(1000)")
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *command: Any, **options: Any) -> None:
            super().__init__(*command, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    options = options_for(tmp_path)
    problems = {
        name: gpu_report.run_phase(Phase(name, limit, ()), options, left_s=WAIT_S)
        for name, limit in (("good", WAIT_S), ("broken", WAIT_S), ("hangs", 3.0))
    }
    assert problems == {
        "good": "", "broken": "failed with status 1: no such device", "hangs": "not done within 3 s",
    }  # fmt: skip
    assert [process.returncode is None for process in started] == [False] * 3
    monkeypatch.setattr(gpu_report, "PHASES", tuple(Phase(name, 1.0, ()) for name in problems))
    page = gpu_report.page(options, problems)
    assert "## good: one" in page
    assert "| x/y | 0.25 |" in page
    assert "a note" in page
    assert "## hangs\n\nno result: not done within 3 s" in page


@pytest.mark.slow
def test_what_a_phase_has_started_is_ended_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is asked to end, and does not, would hold the GPU in the next phase."""
    monkeypatch.setattr(gpu_report, "END_S", 1.0)
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    child = ignores + "print('here', flush=True); time.sleep(99)"
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    process = subprocess.Popen([sys.executable, "-c", parent, child], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == b"here\n"
        gpu_report.end_group(process)
        assert out.read() == b""  # its last writer has ended


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    phase = Phase("x", 1.0, ("json", "no_such_package"))
    assert "no_such_package" in gpu_report.missing(phase, quick=False)
    assert "json" not in gpu_report.missing(phase, quick=False)
    assert str(tmp_path / "nothing") in gpu_report.missing(Phase("x", 1.0, (), data=tmp_path / "nothing"), quick=False)
    assert gpu_report.missing(Phase("x", 1.0, ("json",), data=tmp_path), quick=False) == ""


def test_phases_with_a_result_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(phase: Phase, options: argparse.Namespace, left_s: float) -> str:
        ran.append(phase.name)
        return "broken"

    monkeypatch.setattr(gpu_report, "PHASES", tuple(Phase(name, 1.0, ()) for name in ("kept", "tried", "other")))
    monkeypatch.setattr(gpu_report, "run_phase", run)
    monkeypatch.setattr("sys.argv", ["x", "--output", str(tmp_path), "--only", "kept", "tried"])
    (tmp_path / "kept.json").write_text(json.dumps({"title": "t", "rows": [], "notes": []}))
    assert gpu_report.main() == 1
    assert ran == ["tried"]
    assert "tried: broken" in capsys.readouterr().out
    assert "no result: broken" in (tmp_path / "report.md").read_text()


def test_medians_leave_out_the_steps_that_compile() -> None:
    lines = [
        {"time/step": s, "time/update": u} for s, u in ((9.0, 5.0), (8.0, 4.0), (2.0, 1.0), (3.0, 1.0), (2.5, 2.0))
    ]
    assert gpu_report.row_of([*lines, {"eval/x/avg@1": 0.5}]) == {"steps": 5, "step s": 2.5, "update s": 1.0}
    scores = gpu_report.accuracies([{"eval/x/avg@1": 0.5, "eval/x/avg@1/low": 0.4}, {"eval/x/avg@1": 0.75}])
    assert scores == {"accuracy before": 0.5, "after": 0.75}


def test_the_phase_of_shared_gpus_says_what_a_lag_costs_and_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, ...]] = []

    def train(options: argparse.Namespace, program: str, name: str, *arguments: str) -> list[dict[str, float]]:
        runs.append(arguments)
        lag = int("rollout.max_policy_lag=1" in arguments)
        later = {"rollout/interrupted": 12.0, "rollout/recomputed_tokens": 900.0} if lag else {}
        steps = [{"time/step": 9.0 - 3 * lag, "sync/canary_difference": 0.01} | later for _ in range(4)]
        steps[0]["sync/sampled_difference"] = 0.02
        return steps

    monkeypatch.setattr(gpu_report, "train", train)
    monkeypatch.setattr(gpu_report.models, "random_model", lambda size, **_: tmp_path / size)
    monkeypatch.setattr(gpu_report.models, "write_prompts", lambda folder, rows: (tmp_path / "a", tmp_path / "b"))
    _, (without, with_lag) = gpu_report.shared_lag(options_for(tmp_path))
    same = {"steps": 4, "canary": 0.01, "canary on sampled tokens": 0.02}
    assert without == {"lag": 0, "step s": 9.0, **same}
    assert with_lag == {"lag": 1, "step s": 6.0, "interrupted": 12.0, "recomputed tokens": 900.0, **same}
    assert [set(a) ^ set(b) for a, b in [runs]] == [{"rollout.max_policy_lag=0", "rollout.max_policy_lag=1"}]
    phase = next(phase for phase in gpu_report.PHASES if phase.run is gpu_report.shared_lag)
    assert 0 < phase.limit_s < 28 * 60
    assert gpu_report.place("cuda")[1] == "cluster.placement=colocated"
