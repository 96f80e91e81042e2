"""The learner's calls to the engines, and the account of a transfer: has every engine loaded every announced tensor?

Later updates move the log-probs less than the canary's bound, so only this account sees a tensor that stops arriving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.weights.parameters import ParameterMeta

# A worker's account: tensor -> [bytes that arrived, elements that vLLM copied into layers, numbers of those layers ...]
Loaded = dict[str, list[int]]


class EngineClient:
    """The control plane: vLLM's four weight-update calls, and `loaded_weights`, on every engine at once.

    `call(engine_index, method, *args)` starts a call on one engine and returns a function that waits for it.
    """

    def __init__(
        self, call: Callable[..., Callable[[], Any]], *, engines: Sequence[str], workers_per_engine: int
    ) -> None:
        self._call, self._workers, self._engines = call, workers_per_engine, engines  # names of engines, by index
        self.version = 0
        self.announced: Sequence[ParameterMeta] = ()  # the tensors that the next transfer loads
        # The accounts of one engine's workers in the first transfer, which the canary has verified.
        self.proved: Sequence[Loaded] | None = None
        self.on_failure: Callable[[], object] = lambda: None  # when an engine fails to load, maybe in another thread
        self.failure: Exception | None = None  # of the engine

    def each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call a method of several engines at once: engine index -> its arguments. Returns answers in this order."""
        waits = [self._call(engine, method, *own_arguments) for engine, own_arguments in arguments.items()]
        return [wait() for wait in waits]

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return self.each(method, dict.fromkeys(range(len(self._engines)), arguments))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every engine join the transfer group; the workers of engine i start at rank 1 + i x workers."""
        arguments = {}
        for i in range(len(self._engines)):
            offset = {"rank_offset": 1 + i * self._workers} if "rank_offset" in init_info else {}
            arguments[i] = (init_info | offset,)
        self.each("init_weight_transfer_engine", arguments)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        try:
            self._all("update_weights", update_info)
        except Exception as error:
            self.failure = error
            self.on_failure()
            raise

    def load_adapter(self, file: bytes, version: str) -> None:
        """Put an adapter into the slot of every engine, which checks that it holds exactly this one."""
        self._all("load_adapter", file, version)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update on every engine; ValueError, before any has finished, if one lacks an announced tensor."""
        accounts = self._all("loaded_weights")
        if self.proved is not None and len(self.proved) != self._workers:  # of engines with another tensor_parallel
            self.proved = None
        for engine, account in zip(self._engines, accounts, strict=True):
            check_account(engine, self.announced, account, self.proved)
        self.proved = self.proved or accounts[0]
        self._all("finish_weight_update", weight_version or str(self.version))


def whole_layers(changed: Sequence[str], workers: Sequence[Loaded]) -> list[str]:
    """The changed tensors, and all other tensors of the layers that hold them.

    vLLM builds a layer (q, k and v; gate and up; all experts) from the tensors that arrive, so a part of it would be
    garbage. If the layer of some tensor is unknown, all tensors are returned.

    `workers`: the accounts of one engine for a transfer of all tensors.
    """
    layers: dict[str, set[int]] = {}
    for worker in workers:
        for name, (_, elements, *numbers) in worker.items():
            layers.setdefault(name, set()).update(numbers)
            if elements and not numbers:
                return list(workers[0])
    chosen, held = set(changed), set[int]()
    while more := set().union(*(layers[name] for name in chosen)) - held:
        held |= more
        chosen |= {name for name, numbers in layers.items() if numbers & held}
    return [name for name in layers if name in chosen]


def check_account(
    engine: str, announced: Sequence[ParameterMeta], workers: Sequence[Loaded], proved: Sequence[Loaded] | None = None
) -> None:
    """Check that every tensor of this transfer reached every worker, and that every worker loaded its part of it.

    ValueError names the first incomplete tensor. With tensor parallelism a worker loads its part of most tensors, and
    all of some.

    Args:
        proved: the accounts that the workers have to repeat; None: together they load each tensor whole or not at all.
    """
    if wrong := list(_problems(announced, workers, proved)):
        more = f" {len(wrong) - 1} other tensors are incomplete too." if len(wrong) > 1 else ""
        raise ValueError(
            f"weight transfer to {engine}: {wrong[0]}.{more} The engine would keep old values, so it does not go "
            "on sampling. Continue from the newest checkpoint (--resume). If it happens again, vLLM's "
            "loader for this model does not take the tensor."
        )


def _problems(
    announced: Sequence[ParameterMeta], workers: Sequence[Loaded], proved: Sequence[Loaded] | None
) -> Iterator[str]:
    nothing = [0, 0]
    for meta in announced:
        sizes, parts = zip(*(worker.get(meta.name, nothing)[:2] for worker in workers), strict=True)
        loaded = sum(parts)
        expected = [worker.get(meta.name, nothing)[1] for worker in proved or ()]
        late = [number for number, size in enumerate(sizes) if size != meta.bytes]
        if late:
            yield f"{meta.name}: {sizes[late[0]]} of {meta.bytes} bytes arrived at worker {late[0]}"
        elif proved is None and 0 < loaded < meta.numel:
            yield f"{meta.name}: vLLM loaded {loaded} of {meta.numel} elements"
        elif any(part < proven for part, proven in zip(parts, expected, strict=proved is not None)):
            yield f"{meta.name}: vLLM loaded {loaded} of {sum(expected)} elements"
    names = {meta.name for meta in announced}
    for name in dict.fromkeys(name for worker in workers for name in worker if name not in names):
        yield f"{name}: vLLM loaded it, but the learner had not announced it"
