"""The learner's calls to the engines, and the account of a transfer: every engine has loaded what was announced.

Later updates move the log-probs less than the canary's bound, so only this account sees a tensor that stops arriving.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.weights.transfer import ParameterMeta

Loaded = dict[str, list[int]]  # of one worker, by tensor: bytes that arrived, elements that vLLM copied into layers


class EngineClient:
    """The control plane: vLLM's four weight-update calls, made on every engine at once and waited for.

    `call(engine_index, method, *args)` starts a call on one engine and returns a function that waits for it. `engines`
    are the names of the engines, in the order of their indices.

    Attributes:
        announced: the tensors of the next transfer, or of all if nobody changes it.
        skipped: tensors of which vLLM took nothing in the first transfer, as it does with constants that it sets
            itself. The canary has proved that transfer. None: there was no transfer yet.
        on_failure: called when an engine fails to receive or load, maybe from another thread.
        failure: what the engine failed with.
    """

    def __init__(
        self, call: Callable[..., Callable[[], Any]], *, engines: Sequence[str], workers_per_engine: int
    ) -> None:
        self._call = call
        self._workers = workers_per_engine
        self._engines = engines
        self.version = 0
        self.announced: Sequence[ParameterMeta] = ()
        self.skipped: frozenset[str] | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self.failure: Exception | None = None

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        waits = [self._call(i, method, *arguments[i]) for i in range(len(self._engines))]
        return [wait() for wait in waits]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Give every engine its own place in the group: workers of engine i start at rank 1 + i x workers."""
        ranks = [1 + i * self._workers for i in range(len(self._engines))]
        infos = [init_info | ({"rank_offset": rank} if "rank_offset" in init_info else {}) for rank in ranks]
        self._all("init_weight_transfer_engine", [(info,) for info in infos])

    def start_weight_update(self) -> None:
        self._all("start_weight_update", [()] * len(self._engines))

    def update_weights(self, update_info: Any) -> None:
        try:
            self._all("update_weights", [(update_info,)] * len(self._engines))
        except Exception as error:
            self.failure = error
            self.on_failure()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update on every engine, if every engine has loaded what was announced.

        Raises:
            ValueError: an engine has not; no engine has finished.
        """
        accounts = self._all("loaded_weights", [()] * len(self._engines))
        if self.skipped is None:
            workers = [worker for account in accounts for worker in account]
            taken = {name for worker in workers for name, (_, elements) in worker.items() if elements}
            self.skipped = frozenset(meta.name for meta in self.announced) - taken
        for engine, account in zip(self._engines, accounts, strict=True):
            check_account(engine, self.announced, account, self.skipped)
        self._all("finish_weight_update", [(weight_version or str(self.version),)] * len(self._engines))


def check_account(
    engine: str, announced: Sequence[ParameterMeta], workers: Sequence[Loaded], skipped: Collection[str] = ()
) -> None:
    """Check that every tensor of this transfer came to every worker, and that the workers together loaded it whole.

    With tensor parallelism a worker loads its part of most tensors, and all of some.

    Args:
        skipped: tensors that need not be loaded.

    Raises:
        ValueError: naming the engine, the first such tensor, and how many more there are.
    """
    wrong = list(_problems(announced, workers, skipped))
    if wrong:
        more = f" {len(wrong) - 1} other tensors are incomplete too." if len(wrong) > 1 else ""
        raise ValueError(
            f"weight transfer to {engine}: {wrong[0]}.{more} Its old values would stay in the engine, so the engine "
            "does not go on sampling. Continue from the newest checkpoint (--resume). If it happens again, vLLM's "
            "loader for this model does not take the tensor."
        )


def _problems(announced: Sequence[ParameterMeta], workers: Sequence[Loaded], skipped: Collection[str]) -> Iterator[str]:
    for meta in announced:
        arrived = [worker.get(meta.name, [0, 0]) for worker in workers]
        for number, (size, _) in enumerate(arrived):
            if size != meta.bytes:
                yield f"of {meta.name} {size} of {meta.bytes} bytes arrived at worker {number}"
                break
        else:
            elements = sum(copied for _, copied in arrived)
            if elements < meta.numel and meta.name not in skipped:
                yield f"{meta.name} arrived, and vLLM loaded {elements} of its {meta.numel} elements"
    names = {meta.name for meta in announced}
    for name in dict.fromkeys(name for worker in workers for name in worker if name not in names):
        yield f"{name} was loaded, which the learner has not announced"
