"""A copy of the checkpoints in object storage, or in any other place that fsspec reaches: `checkpoint.mirror`.

    MIRROR/run_id  latest  best  config.yaml  metrics.jsonl  step-000020/...

A checkpoint is complete once its manifest.json exists, which is sent after its other files. `latest` and `best` are
sent after the checkpoint that they name. The mirror belongs to the run whose id is in its `run_id`. Each checkpoint has
that file too, and it is sent first: a folder without the id of this run is never removed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from rlhf.config.secrets import hide
from rlhf.run import checkpoint_files
from rlhf.run.threads import call_in_thread

WAITS_S = (1.0, 5.0, 25.0)  # before each further try of a failed request
ANSWER_S = 60.0  # longest time of a request; one that moves a file may take longer, by the file's size
SLOWEST = 2**20  # bytes per second of the slowest transfer that is accepted
OTHER_MIRROR = "Name another address, correct the access to it, or set it to null."


class Mirror:
    """Checkpoints at an address such as s3://bucket/run. Its methods raise OSError if the address does not answer.

    ValueError if fsspec does not know this kind of address, or the package for it is not installed.
    """

    def __init__(self, url: str, *, waits_s: Sequence[float] = WAITS_S, answer_s: float = ANSWER_S) -> None:
        import fsspec

        self.url = url
        self._waits_s, self._answer_s = waits_s, answer_s
        self._closed: Future[None] = Future()
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"checkpoint.mirror={url}: {error}. Use an address that fsspec knows, such as s3://bucket/run (needs "
                "the package s3fs) or gs://bucket/run (needs gcsfs)."
            ) from None

    def checkpoints(self) -> list[str]:
        """Names of the complete checkpoints in the mirror, oldest first."""
        return checkpoint_files.sorted_checkpoints(
            path.split("/")[-2] for path in self._glob(f"step-*/{checkpoint_files.MANIFEST}")
        )

    def check_empty(self) -> None:
        """Before a new run: ValueError if the mirror cannot be read or holds checkpoints."""
        try:
            complete = self.checkpoints()
        except OSError as error:
            raise ValueError(f"{error}. {OTHER_MIRROR}") from None
        if complete:
            raise ValueError(
                f"checkpoint.mirror={self.url}: already holds {complete[-1]} of a run. Go on with it (--resume), or "
                "name another address."
            )

    def claim(self, run_id: str, *, anew: bool = False) -> None:
        """Write the id of this run into the mirror; OSError if the mirror belongs to another run.

        `anew` takes it from a run that has no checkpoint there, such as one that ended in start-up.
        """
        owner = self._line(checkpoint_files.RUN_ID)
        if not owner or (anew and owner != run_id and not self.checkpoints()):
            self._request(self._fs.makedirs, self._root, True)
            self._write(checkpoint_files.RUN_ID, run_id)
            owner = self._line(checkpoint_files.RUN_ID)  # two runs may have begun at the same time
        if owner != run_id:
            raise OSError(f"checkpoint.mirror={hide(self.url)}: it is the mirror of another run, {owner}")

    def send(self, checkpoint: Path, others: Sequence[Path], *, pointer: str, keep: int, run_id: str) -> None:
        """Copy a checkpoint and other files of the run, unless the mirror has it; name it in the file `pointer`.

        If `pointer` is `latest`, older checkpoints beyond `keep` and older incomplete copies are then removed, except
        the one that `best` names.
        """
        self.claim(run_id)
        manifest = (checkpoint / checkpoint_files.MANIFEST).read_bytes()
        if self._read(f"{checkpoint.name}/{checkpoint_files.MANIFEST}") != manifest:
            pairs = [(path, path.name) for path in others if path.is_file()]
            names = sorted(
                checkpoint_files.manifest_files(manifest), key=lambda name: (name != checkpoint_files.RUN_ID, name)
            )
            pairs += [(checkpoint / name, f"{checkpoint.name}/{name}") for name in (*names, checkpoint_files.MANIFEST)]
            for local, name in pairs:
                self._request(self._put, local, f"{self._root}/{name}", size=local.stat().st_size)
        self._write(pointer, checkpoint.name)
        if pointer == checkpoint_files.LATEST:
            step = checkpoint_files.checkpoint_step(checkpoint.name)
            older = [name for name in self._folders(run_id) if checkpoint_files.checkpoint_step(name) < step]
            whole = [name for name in self.checkpoints() if name in (*older, checkpoint.name)]
            kept = [*whole[-keep:], self._line(checkpoint_files.BEST)]
            self._remove(name for name in older if name not in kept)

    def remove_newer(self, than: str, run_id: str) -> None:
        """Remove this run's newer checkpoints, and `latest` and `best` if they name one of those."""
        self.claim(run_id)
        step = checkpoint_files.checkpoint_step(than)
        self._remove(
            file
            for file in (checkpoint_files.LATEST, checkpoint_files.BEST)
            if checkpoint_files.checkpoint_step(self._line(file)) > step
        )
        self._remove(name for name in self._folders(run_id) if checkpoint_files.checkpoint_step(name) > step)

    def fetch(self, name: str, checkpoints: Path, run_id: str) -> str:
        """Copy a checkpoint of the run `run_id` (empty: any) into a folder; returns the problem, or an empty string."""
        partial, final = checkpoints / f"{name}{checkpoint_files.PARTIAL}", checkpoints / name
        owner = self._line(f"{name}/{checkpoint_files.RUN_ID}")
        if run_id and owner and owner != run_id:
            return f"it is of another run, {owner}"
        if final.exists() and not checkpoint_files.belongs_to_run(final, run_id or owner):
            return f"{name} already exists, but is not of this run"
        try:
            manifest: bytes = self._request(self._fs.cat_file, f"{self._root}/{name}/{checkpoint_files.MANIFEST}")
            wanted = checkpoint_files.manifest_files(manifest)
        except ValueError as error:
            return str(error)
        for file, written in wanted.items():
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                self._request(self._fs.get_file, f"{self._root}/{name}/{file}", str(partial / file), size=written.bytes)
            except FileNotFoundError:
                return f"{file} is missing"
        (partial / checkpoint_files.MANIFEST).write_bytes(manifest)
        if damage := checkpoint_files.find_damage(partial):
            return damage
        shutil.rmtree(final, ignore_errors=True)  # a damaged one
        partial.rename(final)
        return ""

    def fetch_file(self, file: Path) -> None:
        """Copy a file of the run, if the mirror has it."""
        remote = f"{self._root}/{file.name}"
        if self._request(self._fs.exists, remote):
            self._request(self._fs.get_file, remote, str(file))

    def close(self) -> None:
        """Make a request in progress fail at once, because the run ends."""
        self._closed.set_result(None)

    def _folders(self, run_id: str) -> list[str]:
        """Names of this run's checkpoints in the mirror, including incomplete ones."""
        names = checkpoint_files.sorted_checkpoints(path.rpartition("/")[2] for path in self._glob("step-*"))
        return [name for name in names if self._line(f"{name}/{checkpoint_files.RUN_ID}") == run_id]

    def _glob(self, pattern: str) -> list[str]:
        self._fs.invalidate_cache()
        paths: list[str] = self._request(self._fs.glob, f"{self._root}/{pattern}")
        return paths

    def _line(self, file: str) -> str:
        return self._read(file).decode(errors="replace").strip()

    def _read(self, file: str) -> bytes:
        """The content of a small file, or b"" if it does not exist."""
        try:
            content: bytes = self._request(self._fs.cat_file, f"{self._root}/{file}")
        except FileNotFoundError:
            return b""
        return content

    def _write(self, file: str, line: str) -> None:
        self._request(self._fs.pipe_file, f"{self._root}/{file}", f"{line}\n".encode())

    def _put(self, local: Path, remote: str) -> None:
        self._fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(local), remote)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a request that took too long was carried out after all
                self._request(self._fs.rm, f"{self._root}/{name}", True)

    def _request(self, request: Callable[..., Any], *arguments: Any, size: int = 0) -> Any:
        """The answer to a request that moves `size` bytes; a failed one is tried again after growing waits.

        OSError after the last try, FileNotFoundError at once. Clients raise many types of error.
        """
        seconds = self._answer_s + size / SLOWEST  # not every client has a limit of its own
        for wait_s in (*self._waits_s, None):
            if self._closed.done():
                raise OSError(f"checkpoint.mirror={hide(self.url)}: the run ended")
            answer = call_in_thread(request, *arguments)
            done, _ = wait({answer, self._closed}, seconds, FIRST_COMPLETED)
            error: BaseException | None = TimeoutError(f"no answer within {seconds:.0f} s")
            if done:
                error = OSError("the run ended") if self._closed.done() else answer.exception()
            if error is None:
                return answer.result()
            if isinstance(error, FileNotFoundError):
                raise error
            if wait_s is None or wait({self._closed}, wait_s).done:
                raise OSError(f"checkpoint.mirror={hide(self.url)}: {' '.join(str(error).split())}") from error
        raise AssertionError
