"""What a grading process can reach: its code, a folder of its own, and what its reward is granted by name."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import WAIT_S

from rlhf.config.reward import RewardConfig
from rlhf.processes.confinement import (
    ABI_SCOPES,
    CREATE_RULESET,
    KEPT_CAPABILITIES,
    NO_FILE,
    NO_NETWORK,
    NO_SHARED_MEMORY,
)
from rlhf.rewards.grade import Grade
from rlhf.rewards.pool import Pool
from rlhf.rewards.registry import load_user_function
from rlhf.rewards.scorer import Scorer

FIXTURES = Path(__file__).parents[1] / "fixtures"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1) < ABI_SCOPES,
        reason="this kernel has no or an older Landlock",
    ),
]
PACKAGES = (
    "site-packages/a.libs/x.so.1",
    "site-packages/data/x",
    "modules/a.libs/x.so.1",
    "modules/a-1.dist-info/RECORD",
)
VARIABLES = "FAKE_API_KEY HTTPS_PROXY SSL_CERT_FILE USER"
LOOKS, JUDGE = "curious_rewards:looks", "curious_rewards:judge"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this user, with files in it."""
    made = tmp_path_factory.mktemp("files")
    for name in ("mine", "granted"):
        (made / name).write_text("text")
    for name in (*PACKAGES, "modules/runs/log", "libraries/mine.so", "certificates"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("text")
    return made


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Iterator[Scorer]:
    """One part with grants, and two parts without, in one config; ends with a look at what is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FIXTURES))
        for name in ("site-packages", "modules"):
            patch.syspath_prepend(str(folder / name))
        patch.setenv("FAKE_API_KEY", "fake-env-key-123")
        patch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
        patch.setenv("SSL_CERT_FILE", str(folder / "certificates"))
        patch.setenv("LD_LIBRARY_PATH", str(folder / "libraries"))
        patch.setenv("HOME", str(folder))
        patch.setattr("tempfile.tempdir", str(folder / "temporary"))
        (folder / "temporary").mkdir()
        part = {"name": LOOKS, "env": ["FAKE_API_KEY"], "network": True, "files": ["~/granted", "/dev/shm"]}
        values = {"parts": [part], "by_source": {"other": [LOOKS, JUDGE]}, "workers": 1}
        with Scorer(RewardConfig.model_validate(values)) as running:
            assert len(list((folder / "temporary").glob("rlhf-rewards-*/*"))) >= 2
            yield running
        assert list((folder / "temporary").iterdir()) == []


@pytest.fixture(scope="module")
def plain(scorer: Scorer) -> Pool:
    """The processes that are granted nothing."""
    return scorer.pool


def look(pool: Pool, action: str, target: object, name: str = LOOKS) -> Grade:
    job = {"name": name, "options": {}, "response": str(target), "answer": action, "columns": {}, "metadata": {}}
    return pool.submit(job).result(timeout=WAIT_S)


def look_with_grants(scorer: Scorer, action: str, target: object) -> Grade:
    ((future,),) = scorer.submit_batch([str(target)], [action])
    return future.result(timeout=WAIT_S)


def test_this_kernel_confines(plain: Pool) -> None:
    assert plain.unconfined == ()


@pytest.mark.parametrize("action", ["read", "write", "remove"])
def test_files_are_out_of_reach_and_the_message_says_what_to_do(plain: Pool, folder: Path, action: str) -> None:
    grade = look(plain, action, folder / "mine")
    assert (grade.value, grade.status) == (None, "failed")
    assert "Permission denied" in grade.detail
    assert grade.detail.endswith(NO_FILE)
    assert (folder / "mine").read_text() == "text"


@pytest.mark.parametrize("file", ["environ", "mem", "maps", "cmdline"])
def test_other_processes_are_out_of_reach(plain: Pool, file: str) -> None:
    assert look(plain, "read", f"/proc/{os.getpid()}/{file}").status == "failed"
    assert file == "mem" or look(plain, "read", f"/proc/self/{file}").status == "ok"


def test_other_processes_get_no_signal(plain: Pool) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert look(plain, "stop", other.pid).status == "failed"
    other.communicate(b"\n", timeout=WAIT_S)
    assert other.returncode == 0


def test_code_system_files_and_a_temporary_folder_are_within_reach(plain: Pool) -> None:
    for file in (__file__.replace(Path(__file__).name, "__init__.py"), os.__file__, "/etc/passwd"):
        if os.path.exists(file):
            assert look(plain, "read", file).status == "ok"
    assert look(plain, "temporary file", "x").status == "ok"


def test_all_of_a_package_and_the_libraries_is_within_reach_and_not_what_lies_next_to_it(
    scorer: Scorer, plain: Pool, folder: Path
) -> None:
    seen = {name: look(plain, "read", folder / name).status for name in (*PACKAGES, "libraries/mine.so")}
    assert set(seen.values()) == {"ok"}, seen
    for name in ("modules/runs/log", "certificates"):
        assert look(plain, "read", folder / name).status == "failed"
    assert look_with_grants(scorer, "read", folder / "certificates").status == "ok"


def test_the_environment_is_empty_but_for_what_the_part_names(scorer: Scorer, plain: Pool) -> None:
    assert look(plain, "variables", VARIABLES).value == 0.0
    assert look_with_grants(scorer, "variables", VARIABLES).value == 3.0


def test_the_message_names_the_key_of_what_was_refused(scorer: Scorer, plain: Pool) -> None:
    assert look(plain, "local socket", "").detail.endswith(NO_NETWORK)
    assert look(plain, "lock", "").detail.endswith(NO_SHARED_MEMORY)
    assert look(plain, "variable", "NOT_SET").detail.endswith("set `env: [NOT_SET]` next to the name")
    for action in ("local socket", "lock"):
        assert look_with_grants(scorer, action, "").status == "ok"


def test_what_needs_no_network_runs_without_it(plain: Pool) -> None:
    """An event loop connects a pair of sockets, and urllib3 looks for IPv6 when it is imported."""
    assert look(plain, "event loop", "").status == "ok"
    assert look(plain, "import", "urllib3.util.connection").status == "ok"


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("raise NoNetworkError(NO_NETWORK)", f"{NO_NETWORK}."),
        ("import os; os.environ['NOT_SET']", "set `env: [NOT_SET]` next to the name."),
        ("limit = int('x')", "mine.py:2."),
        ("def f(response, **_)\n    return 1.0", "(mine.py, line 2). Correct that line of the file."),
        ("import not_a_module", "Install the package, or start the run from the folder that holds it."),
    ],
)
def test_a_module_that_cannot_be_imported_gets_one_remedy(tmp_path: Path, code: str, end: str) -> None:
    module = tmp_path / "mine.py"
    module.write_text(f"from rlhf.processes.confinement import NO_NETWORK, NoNetworkError\n{code}\n")
    with pytest.raises(ValueError, match="cannot be imported") as caught:
        load_user_function({"name": f"{module}:f"})
    assert str(caught.value).endswith(end)
    assert ("Install" in str(caught.value)) == ("Install" in end)


@pytest.mark.parametrize("action", ["fetch", "look up a name"])
def test_without_the_network_a_call_fails_at_once_and_says_how_to_get_it(plain: Pool, server: int, action: str) -> None:
    grade = look(plain, action, f"http://127.0.0.1:{server}" if action == "fetch" else "localhost")
    assert (grade.value, grade.status) == (None, "failed")
    assert grade.detail.endswith(NO_NETWORK)
    assert "network: true" in NO_NETWORK


def test_a_client_that_tries_again_with_growing_waits_fails_at_once_too(plain: Pool, server: int) -> None:
    assert look(plain, "", f"127.0.0.1:{server}", JUDGE).detail.endswith(NO_NETWORK)


def test_the_kernel_refuses_what_does_not_ask_python_and_what_runs_below(plain: Pool) -> None:
    assert look(plain, "connect without Python", "").value == 0.0
    assert look(plain, "a program below", "").value == 0.0


@pytest.mark.parametrize("how", ["sendto", "connect"])
def test_a_local_service_gets_no_datagram(plain: Pool, folder: Path, how: str) -> None:
    path = folder / f"service-{how}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        service.bind(str(path))
        service.settimeout(0.1)
        assert look(plain, f"datagram by {how}", path).status == "failed"
        with pytest.raises(TimeoutError):
            service.recv(9)


def test_only_with_the_network_a_process_waits_for_connections(scorer: Scorer, plain: Pool) -> None:
    """A socket that was never bound would listen on every address."""
    assert "Errno 13" in look(plain, "listen", "").detail
    assert "Errno 22" in look_with_grants(scorer, "listen", "").detail  # it is connected already


def test_of_roots_privileges_those_are_kept_that_the_folders_of_other_users_need(scorer: Scorer, plain: Pool) -> None:
    own = int(re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[0], 16)
    assert look(plain, "capabilities", "").value == float(own & KEPT_CAPABILITIES)
    assert look_with_grants(scorer, "capabilities", "").value == float(own & KEPT_CAPABILITIES)
    for namespace in (0x10000000, 0x20000):  # of users, of mounts
        assert look_with_grants(scorer, "namespace", namespace).value == 0.0


@pytest.mark.parametrize("action", ["owner", "attribute"])
def test_owners_and_attributes_of_files_cannot_be_changed(plain: Pool, folder: Path, action: str) -> None:
    assert look(plain, action, folder / "mine").status == "failed"


@pytest.mark.parametrize("action", ["affinity", "scheduler", "priority", "limits"])
def test_the_scheduling_and_limits_of_other_processes_cannot_be_changed(plain: Pool, action: str) -> None:
    before = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), resource.getrlimit(resource.RLIMIT_CORE)
    assert look(plain, action, os.getpid()).status == "failed"
    assert before == (
        os.sched_getaffinity(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        resource.getrlimit(resource.RLIMIT_CORE),
    )
    assert look(plain, action, 0).status == "ok"
    assert look(plain, "priority of all", "").status == "failed"


@pytest.mark.parametrize("action", ["mode", "times"])
def test_modes_and_times_of_files_change_only_where_a_function_runs(plain: Pool, folder: Path, action: str) -> None:
    """docs/security.md names this: compilers and copies change the modes of their files."""
    assert look(plain, action, folder / "mine").status == "ok"
    assert changed_by_built_ins(action, folder / "mine") is False


def changed_by_built_ins(action: str, path: Path) -> bool:
    """Whether a process that is confined for built-in rewards alone can do it."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import curious_rewards\n"
        "from rlhf.processes.confinement import Grants; Grants().confine([], Path(sys.argv[4]))\n"
        "curious_rewards.looks(sys.argv[3], answer=sys.argv[2], columns={}, metadata={})\n"
    )
    command = [sys.executable, "-c", code, str(FIXTURES), action, str(path), str(path.parent / "temporary")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0 or "PermissionError" in done.stderr
    return done.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read these files")
def test_the_files_of_passwords_are_out_of_reach_for_root_too(plain: Pool) -> None:
    assert look(plain, "read", "/etc/shadow").status == "failed"
    assert look(plain, "read", "/etc/passwd").status == "ok"


def test_what_is_granted_is_within_reach_and_nothing_else(scorer: Scorer, folder: Path, server: int) -> None:
    assert look_with_grants(scorer, "connect without Python", "").value == 1.0
    assert look_with_grants(scorer, "", f"127.0.0.1:{server}").status == "ok"
    assert look_with_grants(scorer, "write", folder / "granted").status == "ok"
    assert (folder / "granted").read_text() == "textx"
    assert look_with_grants(scorer, "read", folder / "mine").status == "failed"
    assert look_with_grants(scorer, "read", f"/proc/{os.getpid()}/environ").status == "failed"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("env", "NOT_SET_ANYWHERE", "reward env=NOT_SET_ANYWHERE: .*Set it"),
        ("files", "~/not/there", r"reward files=/.*/not/there: .*Create it"),
    ],
)
def test_a_grant_of_what_is_not_there_is_named_before_anything_starts(key: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scorer(RewardConfig.model_validate({"parts": [{"name": LOOKS, key: [value]}]}))


def test_a_built_in_reward_takes_no_grants() -> None:
    with pytest.raises(ValueError, match=r"reward\.parts\.0\.network=true: .*a function of yours"):
        RewardConfig.model_validate([{"name": "math", "network": True}])


WITHOUT = """
import os, sys
from rlhf.config.reward import RewardConfig
from rlhf.processes import confinement
from rlhf.rewards.scorer import Scorer
confinement.prctl(confinement.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
forbidden = {"landlock_create_ruleset": confinement.REFUSE}
confinement._set_filter(confinement._assembled(forbidden, {}, confinement.WORD))
with Scorer(RewardConfig.model_validate({"parts": ["math"], "workers": 1})) as scorer:
    print(*scorer.warnings)
    print(scorer.graded_batch(scorer.submit_batch([r"\\boxed{5}"], ["5"]))[0].value)
"""


def test_a_kernel_without_landlock_is_a_warning() -> None:
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    warning, score = done.stdout.splitlines()
    assert warning.startswith("reward: this kernel cannot keep")
    assert score == "1.0"
