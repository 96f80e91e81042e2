"""Program: rlhf.grpo in which faults happen at chosen moments; and how the tests start it.

    python faulty_run.py FAULTS TRACE ARGUMENTS OF rlhf.grpo

FAULTS is a JSON list of `Fault`. TRACE gets a line of JSON for each fault when it happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from processes import Process, below, running, shared_memory
from shared_cpu import allow
from waiting import STACK_WAIT_S

BETWEEN_S = 1.0  # between two signals, so that the run's own code has had its turn
FIND_S = 120.0  # for a process that is about to start


class Fault(NamedTuple):
    """What happens, once, at the first such moment from this training step on; 0 is start-up. One fault a moment.

    Attributes:
        at: `update`, a phase of the run's clock that begins; `.send_weights`, a call that was sent to actors; `joined`,
            a new engine has the current weights; `!os.rename .partial`, an audit event of Python that is about to
            change a path of the run folder that contains the word.
        do: the name of a function of this file, followed by its arguments.
    """

    step: int
    at: str
    do: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """A program that has ended, and its trace: of each fault its time, the processes and their shared memory."""

    status: int
    output: str
    errors: str
    trace: list[dict[str, Any]]

    @property
    def processes(self) -> list[Process]:
        return [Process(*pair) for row in self.trace for pair in row["processes"]]

    def around_step(self, step: int) -> str:
        """What was printed from the first line of the step before this one to that of the step after it."""
        after = re.split(rf"^step +{step - 1}/", self.output, maxsplit=1, flags=re.MULTILINE)[1]
        return re.split(rf"^step +{step + 1}/", after, maxsplit=1, flags=re.MULTILINE)[0]


def run_with_faults(config: Path, faults: Iterable[Fault], *more: str, **environment: str) -> Ended:
    trace = config.with_suffix(".trace")
    trace.write_text("")
    command = [sys.executable, __file__, json.dumps(list(faults)), str(trace), "--config", str(config), *more]
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths, "COLUMNS": "1000"} | environment,
        capture_output=True, text=True, timeout=2 * STACK_WAIT_S, stdin=subprocess.DEVNULL, check=False,
        start_new_session=True,  # for `signal_group`
    )  # fmt: skip
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    return Ended(done.returncode, done.stdout, done.stderr, rows)


# --- the program ---


class Faults:
    """The faults that are still to come.

    Attributes:
        run, loop, step: the run, its rollout side, and the training step that it takes.
    """

    def __init__(self, faults: Sequence[Fault], trace: Path) -> None:
        self.run: Any = None
        self.loop: Any = None
        self.step = 0
        self._faults, self._trace, self._command = list(faults), trace, os.getpid()

    @functools.cached_property
    def _waiting(self) -> list[Fault]:
        """Without those that happened to the drivers before this one; asked first in a driver."""
        waiting = list(self._faults)
        for line in self._trace.read_text().splitlines():
            step, at, do, arguments = json.loads(line)["fault"]
            waiting.remove(Fault(step, at, do, tuple(arguments)))
        return waiting

    def moment(self, name: str) -> None:
        for fault in [fault for fault in self._waiting if fault.at == name and self.step >= fault.step][:1]:
            self._waiting.remove(fault)
            alive = running(below({os.getpid()}))
            row = {"time": time.time(), "fault": fault, "step": self.step, "processes": [*map(astuple, alive)]}
            row["shared"] = sorted(map(str, shared_memory(alive)))
            with self._trace.open("a") as file:
                file.write(json.dumps(row) + "\n")
            ACTS[fault.do](self, *fault.arguments)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """A moment for each waiting fault that names this event and a word of its paths; opened files are written."""
        if os.getpid() == self._command:
            return
        reads = event == "open" and not set(str(arguments[1])) & set("wax+")
        for name in () if reads else {fault.at for fault in self._waiting if fault.at.startswith(f"!{event} ")}:
            if name.split()[1] in " ".join(map(str, arguments)):
                self.moment(name)


def send_signals(faults: Faults, *names: str) -> None:
    """To this process: the first at once."""
    os.kill(os.getpid(), signal.Signals[names[0]])
    for later, name in enumerate(names[1:], 1):
        threading.Timer(later * BETWEEN_S, os.kill, (os.getpid(), signal.Signals[name])).start()


def signal_group(faults: Faults, name: str) -> None:
    """To the command that the user started and to its process group, as `timeout` does."""
    command = os.getppid()
    os.kill(command, signal.Signals[name])
    os.killpg(command, signal.Signals[name])


def strike(faults: Faults, command: str, name: str, index: str = "0", hold_s: str = "0") -> None:
    """A signal to a process of the run: at once, or as soon as there is one of this command.

    The driver is held for `hold_s`: what it does next, after its watch of Ray, is not steps later on a fast machine.
    """

    def struck() -> bool:
        alive = running(below({os.getpid()}))
        # A process that this one has just forked still has this one's command, in which the faults are written out.
        found = sorted(process.pid for process, text in alive.items() if command in text and __file__ not in text)
        if len(found) > int(index):
            os.kill(found[int(index)], signal.Signals[name])
        return len(found) > int(index)

    def look_and_strike() -> None:
        end = time.monotonic() + FIND_S
        while time.monotonic() < end and not struck():
            time.sleep(0.02)

    if struck():
        time.sleep(float(hold_s))
    else:  # the run's own code waits meanwhile: on a busy machine it would be steps ahead
        threading.Thread(target=look_and_strike).start()


def shell(faults: Faults, command: str) -> None:
    subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL)


def poison(faults: Faults, name: str, rank: str) -> None:
    """Call one of the functions below in the process of a learner."""
    import ray

    ray.get(faults.run.cluster.learners.actors[int(rank)].call.remote("apply", POISONS[name]))


def nan_in_logits(learner: Any) -> None:
    """In the next forward pass."""

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        hook.remove()
        return output * float("nan")

    hook = learner.transformer.model.norm.register_forward_hook(spoil)


def nan_in_gradient(learner: Any, *, once: bool = True) -> None:
    """In the next backward pass, or in all."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if once:
            hook.remove()
        return gradient * float("nan")

    hook = next(iter(learner.trained.values())).register_hook(spoil)


def nan_in_engine_logprob(faults: Faults) -> None:
    """In the next response of an engine, at its last token."""
    worker = faults.loop.workers.local
    assert worker is not None
    generate = worker.generate

    async def spoiled(*arguments: Any, **options: Any) -> list[Any]:
        worker.generate = generate
        first, *others = await generate(*arguments, **options)
        logprobs = first.logprobs.copy()
        logprobs[-1] = float("nan")
        return [replace(first, logprobs=logprobs), *others]

    worker.generate = spoiled


def lose_weights(faults: Faults, engine: str, name: str) -> None:
    """From now on an engine's loader does not take this tensor. Needs VLLM_ALLOW_INSECURE_SERIALIZATION=1."""
    import ray

    def lose(worker: Any) -> None:
        kind = type(worker.model_runner.get_model())
        load_all = kind.load_weights
        kind.load_weights = lambda self, weights: load_all(self, (pair for pair in weights if pair[0] != name))

    def ask(actor: Any) -> None:  # Ray calls it in a thread of its own
        vllm = actor._hosted._engine
        asyncio.run_coroutine_threadsafe(vllm.collective_rpc(lose), vllm.output_handler.get_loop()).result(STACK_WAIT_S)

    ray.get(faults.loop.engines.group.actors[int(engine)].__ray_call__.remote(ask))


ACTS: dict[str, Any] = {
    act.__name__: act
    for act in (send_signals, signal_group, strike, shell, poison, nan_in_engine_logprob, lose_weights)
}
POISONS = {
    "nan_in_logits": nan_in_logits,
    "nan_in_gradient": nan_in_gradient,
    "nan_in_every_gradient": functools.partial(nan_in_gradient, once=False),
}


def watch_moments(faults: Faults) -> None:
    """Wrap what the moments are made of."""
    from rlhf import grpo
    from rlhf.cluster.actors import ActorGroup, record_call
    from rlhf.cluster.engine_choice import EngineChoice
    from rlhf.cluster.engines import Engines
    from rlhf.log.clock import Clock

    train_step, phase, join, original_call = grpo.train_step, Clock.phase, Engines._join, ActorGroup.call

    async def in_step(run: Any, loop: Any, step: int) -> None:
        faults.run, faults.loop, faults.step = run, loop, step + 1
        await train_step(run, loop, step)

    @contextlib.contextmanager
    def in_phase(clock: Clock, name: str) -> Iterator[None]:
        faults.moment(name)
        with phase(clock, name):
            yield

    async def joined(engines: Engines, rank: int, new: Any) -> None:
        await join(engines, rank, new)
        faults.moment("joined")

    def call(group: Any, ask: Any, **options: Any) -> Any:
        answers = original_call(group, ask, **options)
        faults.moment(f".{record_call(ask)[0]}")
        return answers

    def after_sending(original: Any, name: str | None = None) -> Any:
        async def one(group: Any, *arguments: Any, **options: Any) -> Any:
            called = asyncio.ensure_future(original(group, *arguments, **options))
            await asyncio.sleep(0)
            faults.moment(f".{name or record_call(arguments[1])[0]}")
            return await called

        return one

    setattr(ActorGroup, "call", call)  # noqa: B010
    setattr(ActorGroup, "call_one", after_sending(ActorGroup.call_one))  # noqa: B010
    setattr(EngineChoice, "generate", after_sending(EngineChoice.generate, "generate"))  # noqa: B010
    setattr(ActorGroup, "build", after_sending(ActorGroup.build, "build"))  # noqa: B010
    setattr(grpo, "train_step", in_step)  # noqa: B010
    setattr(Clock, "phase", in_phase)  # noqa: B010
    setattr(Engines, "_join", joined)  # noqa: B010
    sys.addaudithook(faults.audit)


def main() -> int:
    from rlhf import grpo
    from rlhf.run.supervisor import supervise

    faults = [Fault(step, at, do, tuple(words)) for step, at, do, words in json.loads(sys.argv[1])]
    watch_moments(Faults(faults, Path(sys.argv[2])))
    allow()
    return supervise(lambda: grpo.main(sys.argv[3:]))


if __name__ == "__main__":
    sys.exit(main())
