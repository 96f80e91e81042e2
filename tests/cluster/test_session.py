"""After a failure: the cause from what the actors printed."""

from __future__ import annotations

from pathlib import Path

from rlhf.cluster.session import error_in_logs


def test_the_first_error_that_is_no_consequence_is_the_cause(tmp_path: Path) -> None:
    first, second = tmp_path / "worker-a.out", tmp_path / "worker-b.err"
    first.write_text(
        "(EngineCore pid=7) INFO 11-22 ready\n"
        "(EngineCore pid=7) ERROR 11-22 11:29:20 [core.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-22 11:29:20 [core.py:1] RuntimeError: CPU Generator does not use offset\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    )
    second.write_text("ConnectionResetError: [Errno 104] Connection reset by peer\n")
    assert error_in_logs([first, second]) == "worker-a.out: RuntimeError: CPU Generator does not use offset"
    assert error_in_logs([second]) == ""
