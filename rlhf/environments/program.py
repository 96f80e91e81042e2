"""A program as an environment: started once for each rollout, it speaks to the model over HTTP. Standard library only.

It runs in a process domain of its own, in a folder of its own, and ends with everything that it has started before its
reward is read. Its environment says where the model is, what its row is, and where it may leave its reward:

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY
    RLHF_ROW        a JSON file with the columns of its row
    RLHF_SEED       a number that all members of its group have
    RLHF_REWARD     the file for its reward: a number, or {"score": number, name: number, "facts": {...}}
    RLHF_CONFINED   a program that runs the command of its arguments in a domain below, out of reach of both files
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.processes.domains import Command, write_launcher
from rlhf.processes.outside import over_clock, remove
from rlhf.processes.returned import as_utf8_json, read_returned

TIMEOUT_S = 600.0  # where the config sets none
ALIVE_S = 1.0  # between signs of life
MAX_REWARD_BYTES, SHOWN_BYTES = 1 << 20, 1000  # of the reward file; of the output in an error
MAX_OUTPUT_BYTES = 64 << 20
SHELL_SIGNAL = 128  # a shell ends with this plus the number of the signal that ended its command
MAX_FILES, MAX_FILE_BYTES = 32, 64 << 10
KEPT = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "no_proxy",
    "NO_PROXY",
)  # fmt: skip


class LimitError(Exception):
    """A call exceeded a limit, or a program ended in a way that its model can cause; `failed_reward` is its reward."""


def named_files(command: Sequence[str]) -> set[int]:
    """Indices of the words after the first that name existing files; the module of `python -m` does not count."""
    first = next((n for n, word in enumerate(command) if n and not word.startswith("-")), 0)
    module = first if first > 1 and command[first - 1] == "-m" else 0
    return {number for number, word in enumerate(command) if number not in (0, module) and os.path.exists(word)}


class Program:
    """Runs a command once for each rollout.

    Args:
        command: `python` is the interpreter of this process; relative file names start where the run was started.
        timeout_s: limit of a whole rollout; None: TIMEOUT_S.
        env: names of further environment variables for the program.
        returned_files: patterns of files in its folder that parts of the reward get.
        readable: files that it may read.
        files: files outside of its folder that it may write.
    """

    def __init__(
        self, command: Sequence[str], timeout_s: float | None, env: Sequence[str], returned_files: Sequence[str] = (),
        readable: Sequence[str] = (), files: Sequence[str] = (),
    ) -> None:  # fmt: skip
        words = [sys.executable if command[0] == "python" else command[0], *command[1:]]
        named = named_files(words)
        words[0] = shutil.which(words[0]) or words[0]
        self._command = [os.path.abspath(word) if number in {0, *named} else word for number, word in enumerate(words)]
        self._timeout_s, self._env, self._returned = timeout_s or TIMEOUT_S, tuple(env), tuple(returned_files)
        self._readable, self._files = readable, files

    def play(self, message: Mapping[str, Any], say_alive: Callable[[], None]) -> dict[str, Any]:
        """Run the program once; returns its outcome. RefusedError if it could not be started.

        LimitError if it took too long, printed too much, died of a signal, or left too many files or a bad reward;
        ValueError if its exit status is not 0.
        """
        folder = Path(tempfile.mkdtemp(prefix="program-"))
        try:
            with open(folder / "output.txt", "w+b") as output:
                status = self._run(message, folder, output, say_alive)
                if (size := output.seek(0, os.SEEK_END)) > MAX_OUTPUT_BYTES:
                    raise LimitError(f"the program printed {size:,} bytes, more than {MAX_OUTPUT_BYTES:,}")
                output.seek(max(0, size - SHOWN_BYTES))
                shown = output.read(SHOWN_BYTES).decode("utf-8", "replace").strip() or "it printed nothing"
            if (killed := -status if status < 0 else status - SHELL_SIGNAL) in signal.valid_signals():
                raise LimitError(f"the program was ended by signal {killed}: {shown}")
            if status != 0:
                raise ValueError(f"the program ended with status {status}: {shown}")
            reward = _read_reward_file(folder / "reward.json")
            return {**reward, "files": _returned_files(folder / "work", self._returned)} if self._returned else reward
        finally:
            remove(folder)

    def _run(self, message: Mapping[str, Any], folder: Path, output: Any, say_alive: Callable[[], None]) -> int:
        work = folder / "work"
        work.mkdir()
        (folder / "row.json").write_text(json.dumps(message["row"]))
        endpoint = message["endpoint"]
        variables = {name: os.environ[name] for name in (*KEPT, *self._env) if name in os.environ} | {
            "HOME": str(work),
            "TMPDIR": str(work),
            "OPENAI_BASE_URL": f"{endpoint['url']}/v1",
            "OPENAI_API_KEY": endpoint["key"],
            "ANTHROPIC_BASE_URL": endpoint["url"],
            "ANTHROPIC_API_KEY": endpoint["key"],
            "RLHF_ROW": str(folder / "row.json"),
            "RLHF_SEED": str(message["seeds"]["group"]),
            "RLHF_REWARD": str(folder / "reward.json"),
            "RLHF_CONFINED": str(folder / "confined"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        write_launcher(folder / "confined", work, self._readable)
        deadline, printed = time.monotonic() + self._timeout_s, os.open(output.name, os.O_WRONLY | os.O_APPEND)
        try:
            how: dict[str, Any] = {"work": work, "variables": variables, "writable": self._files}
            running = Command(self._command, folder, output=printed, **how)
        finally:
            os.close(printed)
        try:
            running.begin()
            while not select.select([running], [], [], max(0.0, min(ALIVE_S, deadline - time.monotonic())))[0]:
                if time.monotonic() > deadline:
                    raise LimitError(f"{over_clock(self._timeout_s)} (environment.timeout_s)")
                if os.fstat(output.fileno()).st_size > MAX_OUTPUT_BYTES:
                    return 0  # the caller refuses it
                say_alive()
            return running.ended()[0]
        finally:
            running.close()


def _returned_files(folder: Path, patterns: Sequence[str]) -> dict[str, str]:
    """Relative name -> text (at most MAX_FILE_BYTES) of the readable regular files that match; links do not count.

    Raises LimitError if they are over MAX_FILES, or the folder cannot be searched.
    """
    texts: dict[str, str] = {}
    real = folder.parent.resolve() / folder.name  # the program may have put a link in place of the folder itself
    try:
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            name = str(path.relative_to(folder))
            if name in texts or not path.is_file() or path.resolve() != real / name:
                continue
            if len(texts) == MAX_FILES:
                raise LimitError(f"the program left over {MAX_FILES} files of environment.returned_files")
            with (
                contextlib.suppress(OSError),
                open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file,
            ):
                texts[name] = file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    except (OSError, RecursionError) as error:
        raise LimitError(f"the program left folders that cannot be searched for returned_files: {error}") from None
    return dict(sorted(texts.items()))


def _read_reward_file(file: Path) -> dict[str, Any]:
    """The outcome of `read_reward` for the reward file, with the reward None without a file. Raises LimitError."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as left:
            text = left.read(MAX_REWARD_BYTES + 1)
    except FileNotFoundError:
        text = b"null"
    except OSError:  # a link, or a folder
        text = b""
    try:
        return read_reward(text, "the reward file")
    except ValueError as error:
        raise LimitError(str(error)) from None


def read_reward(text: bytes, where: str) -> dict[str, Any]:
    """Read a reward in JSON: a number, null, or an object with `score`, further numbers and `facts`.

    Raises ValueError if the text has another form, or over MAX_REWARD_BYTES.
    """
    try:
        if len(text) > MAX_REWARD_BYTES:
            raise ValueError(f"it has over {MAX_REWARD_BYTES} bytes")
        value = json.loads(text)
        facts = (value.pop("facts", None) if isinstance(value, dict) else None) or {}
        said = read_returned(None if value == {} else value)  # only facts
        facts = as_utf8_json({**said.others, **dict(facts)})
        return {"reward": said.score, "parts": said.numbers, "facts": facts, "attributes": None}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where} holds no reward: {str(error).removeprefix('returned ')}") from None
