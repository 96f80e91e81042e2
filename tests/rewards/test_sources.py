"""A running run has one reward: new workers load the code that the first ones loaded, or none."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S, eventually, worker_pids

from rlhf.config.reward import RewardPart
from rlhf.processes.code import changed_sources, loaded_sources
from rlhf.rewards.pool import Pool
from rlhf.rewards.registry import load_user_function

ONE = "import helper\n\ndef score(response, **_):\n    return helper.VALUE\n"


class ImpatientPool(Pool):
    reload_s = 1.5


class SlowToClose(Pool):
    """A pool that is closed only when two of its workers have told why they cannot start."""

    told = 0

    def _refuse(self, worker: Any, problem: str) -> None:
        super()._refuse(worker, problem)
        self.told += 1

    def close(self) -> None:
        assert eventually(lambda: self.told > 1)
        super().close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a reward and a module that it imports."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "mine.py").write_text(ONE)
    (tmp_path / "helper.py").write_text("VALUE = 1.0\n")
    (tmp_path / "other.py").write_text("")
    return tmp_path


def job(folder: Path) -> dict[str, Any]:
    name = f"{folder}/mine.py:score"
    return {"name": name, "options": {}, "response": "", "answer": "", "columns": {}, "metadata": {}}


def pool_of(folder: Path, kind: type[Pool] = Pool, workers: int = 1, **options: Any) -> Pool:
    return kind(workers=workers, user_functions=[RewardPart(name=job(folder)["name"])], **options)


def lose_workers(pool: Pool) -> None:
    before = worker_pids(pool)
    for worker in before:
        os.kill(worker, signal.SIGKILL)
    assert eventually(lambda: set(before).isdisjoint(worker_pids(pool)))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "edited"), [(1, "helper.py"), (8, "mine.py")])
def test_code_that_was_away_or_edited_for_a_moment_is_loaded_again(folder: Path, workers: int, edited: str) -> None:
    said: list[str] = []
    before = (folder / edited).read_text()
    with pool_of(folder, workers=workers, say=said.append) as pool:
        (folder / edited).write_text(before + "# edited\n" if workers == 1 else "import no_such_module\n")
        lose_workers(pool)
        grade = pool.submit(job(folder))
        assert eventually(lambda: said)
        time.sleep(1.5)
        assert not grade.done()
        (folder / edited).write_text(before)
        assert grade.result(timeout=WAIT_S).value == 1.0
    (line,) = said
    assert line.startswith(f"reward name='{folder}/mine.py:score': ")
    assert line.endswith(" New processes try again for 30 s.")


@pytest.mark.slow
def test_a_reward_that_stays_away_ends_every_wait_with_the_reason(folder: Path) -> None:
    with pool_of(folder, ImpatientPool) as pool:
        (folder / "mine.py").unlink()
        lose_workers(pool)
        one, many = pool.submit(job(folder)), pool.submit_many([job(folder) for _ in range(3)])
        reason = r"mine\.py .*FileNotFoundError.* for 2 s\. Continue with --resume"
        for future in (one, *many):
            with pytest.raises(RuntimeError, match=reason):
                future.result(timeout=WAIT_S)
        with pytest.raises(RuntimeError, match=reason):
            pool.submit(job(folder))


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["mine.py", "helper.py"])
def test_code_that_is_edited_while_the_run_is_running_grades_nothing(folder: Path, changed: str) -> None:
    before = (folder / changed).read_text()
    with pool_of(folder, ImpatientPool) as pool:
        (folder / changed).write_text(before.replace("1.0", "2.0") + "# edited\n")
        assert pool.submit(job(folder)).result(timeout=WAIT_S).value == 1.0  # the worker has the code that it loaded
        lose_workers(pool)
        with pytest.raises(RuntimeError, match=rf"^reward name='{folder}/mine\.py:score': {changed} has changed "):
            pool.submit(job(folder)).result(timeout=WAIT_S)


@pytest.mark.slow
def test_a_start_that_failed_is_not_tried_again(folder: Path) -> None:
    (folder / "mine.py").write_text("import no_such_module\n")
    said: list[str] = []
    with pytest.raises(ValueError, match="no_such_module"):
        pool_of(folder, SlowToClose, workers=2, say=said.append)
    assert said == []


@pytest.fixture
def forget() -> Iterator[None]:
    """Forgets the modules that a test imports."""
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        del sys.modules[name]


def sources(name: str) -> dict[str, dict[str, str]]:
    before = set(sys.modules)
    importlib.invalidate_caches()
    load_user_function(RewardPart(name=name).model_dump())
    return loaded_sources([name], before=before)


@pytest.mark.usefixtures("forget")
def test_the_code_of_a_file_is_that_file_and_what_it_imports_from_its_folder(folder: Path) -> None:
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "installed.py").write_text("")
    sys.path.insert(0, str(folder / "site-packages"))
    (folder / "mine.py").write_text("import ast, installed, rlhf.rewards.patience\n" + ONE)
    ((_, files),) = sources(f"{folder}/mine.py:score").items()
    sys.path.remove(str(folder / "site-packages"))
    assert sorted(files) == ["helper.py", "mine.py"]


@pytest.mark.usefixtures("forget")
def test_the_code_of_a_module_is_its_package_as_far_as_it_is_imported(folder: Path) -> None:
    package = folder / "package_of_rewards"
    (package / "below").mkdir(parents=True)
    for file in ("__init__.py", "words.py", "unused.py", "below/__init__.py"):
        (package / file).write_text("")
    (package / "below" / "mine.py").write_text("from package_of_rewards import words\n" + ONE)
    ((name, files),) = sources("package_of_rewards.below.mine:score").items()
    assert name == "package_of_rewards.below.mine:score"
    assert sorted(files) == ["__init__.py", "below/__init__.py", "below/mine.py", "words.py"]


def test_a_function_is_changed_if_its_file_or_one_that_is_loaded_again_is_another() -> None:
    before = {"m.py:f": {"m.py": "1", "a.py": "1", "b.py": "2"}, "gone.py:f": {"gone.py": "1"}}
    assert (
        list(
            changed_sources(before, {"m.py:f": {"m.py": "1", "c.py": "2"}, "new.py:f": {"new.py": "1"}}, noun="reward")
        )
        == []
    )
    (changed,) = changed_sources(before, {"m.py:f": {"m.py": "3", "a.py": "1", "b.py": "3"}}, noun="reward")
    assert changed == "reward name='m.py:f': b.py, m.py"
    (changed,) = changed_sources(
        before, {"m.py:f": {"__init__.py": "1", "a.py": "1"}}, noun="reward"
    )  # a package in its place
    assert changed == "reward name='m.py:f': __init__.py"


MAKES_UP_A_FILE = """import standard, sys, types
sys.modules["ops"] = types.ModuleType("ops")
sys.modules["ops"].__file__ = "PLACE"
"""


@pytest.mark.usefixtures("forget")
def test_made_up_files_and_the_standard_library_are_not_code_of_a_reward(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "library").mkdir()
    (folder / "library" / "standard.py").write_text("")
    monkeypatch.syspath_prepend(str(folder / "library"))
    monkeypatch.setattr("rlhf.processes.code.STANDARD_LIBRARY", folder / "library")
    for place in ("_ops.py", "other.py", f"{folder}/nowhere.py"):
        (folder / "mine.py").write_text(MAKES_UP_A_FILE.replace("PLACE", place) + ONE)
        for name in ("ops", "standard", "helper", f"{folder}/mine.py"):
            sys.modules.pop(name, None)
        ((_, files),) = sources(f"{folder}/mine.py:score").items()
        assert sorted(files) == ["helper.py", "mine.py"]
