"""Ray actors as groups: hosted classes, calls with deadlines, and the cause of a failure in one line.

A call is written as a lambda, `engines.call(lambda engine: engine.sleep())`: an editor jumps to the method, and mypy
checks its name, its arguments and the type of the answers. The lambda runs once, in the driver, on a recorder; the
name and the arguments are sent. So the driver need not import the hosted class.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast, overload

import psutil
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup

from rlhf.learner.port import free_port
from rlhf.processes import objects

T = TypeVar("T")
Hosted = TypeVar("Hosted", covariant=True)  # the class that the actors of a group host
CONNECT_S = 20.0
END_S = 20.0
DEATH_NOTICE_S = 5.0  # after a failure: time in which another actor's death may still be noticed


class ClusterError(RuntimeError):
    """Something outside the config failed at run time. The message names the cause."""


class LostError(ClusterError):
    """An actor died, failed in a call, or did not answer in time; a new one may do better."""


class SilentError(LostError):
    """An actor did not answer until the deadline of a call."""


@dataclass(frozen=True)
class Location:
    """Where an actor runs; `actor` and `node` are their ids in Ray."""

    actor: str
    node: str
    host: str  # the address of the node
    process: int
    port: int  # free on the node
    gpu_ids: tuple[str, ...]  # assigned by Ray
    cores: int  # of the node that the process may use, whatever it has reserved


class HostedActor:
    """A Ray actor around a class that is imported in the actor's process only.

    The driver names it by module and class, and so does not import torch, DeepSpeed or vLLM itself. The object is built
    in a second call, when all actors of the group are located.
    """

    _hosted: Any = None

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def locate(self) -> Location:
        context, gpu_ids = ray.get_runtime_context(), tuple(map(str, ray.get_gpu_ids()))
        actor, host = str(context.get_actor_id()), ray.util.get_node_ip_address()
        cores = len(os.sched_getaffinity(0))
        return Location(actor, context.get_node_id(), host, os.getpid(), free_port(), gpu_ids, cores)

    def build(self, given: Mapping[str, Any], environment: Mapping[str, str], *arguments: Any) -> None:
        """Set the environment that the libraries read when they are imported, then import and construct.

        `given`: objects of the driver, as `objects.sent` returns them.
        """
        objects.receive(given)
        os.environ.update(environment)
        gc.disable()  # the garbage collector would take a third of the time of the import
        try:
            module = importlib.import_module(self._module)
        finally:
            gc.freeze()  # imported modules are never garbage
            gc.enable()
        self._hosted = getattr(module, self._name)(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._hosted, method)(*arguments)


class HostedAsyncActor(HostedActor):
    """A hosted actor for a class whose methods are coroutines; many calls run at once.

    The object is built in a thread, so that `end_children` can be called during start-up.
    """

    async def locate(self) -> Location:  # type: ignore[override]
        return super().locate()

    async def build(  # type: ignore[override]
        self, given: Mapping[str, Any], environment: Mapping[str, str], *arguments: Any
    ) -> None:
        await asyncio.to_thread(super().build, given, environment, *arguments)

    async def end_children(self) -> None:
        """Kill every process that this actor started; they would outlive it.

        Python's resource trackers are spared: they remove the shared memory of the others, and then end themselves.
        """
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any("multiprocessing.resource_tracker" in argument for argument in process.cmdline()):
                    process.kill()

    async def call(self, method: str, *arguments: Any) -> Any:
        return await getattr(self._hosted, method)(*arguments)


async def wait_for(
    awaitable: Awaitable[Any], *, what: str, deadline_s: float, homes: Mapping[str, str] | None = None
) -> Any:
    """Await with a deadline. A failure becomes a LostError that names `what` and the cause.

    A ValueError of the actor is raised unchanged: it is a message for the user.

    `homes`: actor id -> the actor's name and node, for the message when it is gone; Ray often names neither.
    """
    try:
        # asyncio.wait_for of Python 3.11 swallows a cancellation that comes with the result, and leaves the error of a
        # cancelled gather to be printed.
        async with asyncio.timeout(deadline_s):
            return await awaitable
    except RayTaskError as error:  # before TimeoutError: Ray's wrapper of an actor's own time-out is one too
        cause = error.cause if isinstance(error.cause, Exception) else error
        if isinstance(cause, ValueError):
            raise cause from None
        # some exceptions hold their arguments twice after pickling
        message = " ".join(dict.fromkeys(str(argument) for argument in cause.args)) or str(cause)
        raise LostError(f"{what} failed: {type(cause).__name__}: {message}") from error
    except RayActorError as error:
        home = (homes or {}).get(str(error.actor_id))
        lost = f"{home} is lost: " if home else ""
        raise LostError(f"{what} failed: {lost}{' '.join(str(error).split())}") from error
    except TimeoutError:
        raise SilentError(f"{what}: no answer within {deadline_s:.0f} s.") from None


class _Recorder:
    """Stands for a hosted object: a method returns its name and arguments."""

    def __getattr__(self, method: str) -> Callable[..., tuple[Any, ...]]:
        return lambda *arguments: (method, *arguments)


def record_call(ask: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The name of the method that `ask` calls on its argument, then the arguments; they are positional."""
    return ask(_Recorder())


def put(value: T) -> T:
    """Store an argument of a call once on each node, for all actors there; the hosted method gets the value itself."""
    return cast(T, ray.put(value))


class ActorGroup(Generic[Hosted]):
    """Actors of one kind, called together; the order of `actors` is the order of ranks."""

    def __init__(self, name: str, actors: list[Any], *, deadline_s: float) -> None:
        self.name, self.actors, self.deadline_s = name, actors, deadline_s
        self.locations: list[Location] = []  # of each actor; empty until they are located
        self.bundles: list[int] = []  # of each actor, by its number in a placement group of Ray
        self.reservation: PlacementGroup | None = None  # that placement group; None if another group owns it
        self.absent: set[int] = set()  # ranks whose actors are lost and not replaced yet
        self.built = False

    @property
    def homes(self) -> dict[str, str]:
        """Actor id -> its name and node, for all located actors in the order of ranks."""
        places = enumerate(self.locations)
        return {place.actor: f"{self.name} {rank} on node {place.host} ({place.node[:8]})" for rank, place in places}

    @property
    def present(self) -> list[Any]:
        """The actors that take part in calls."""
        return [actor for rank, actor in enumerate(self.actors) if rank not in self.absent]

    @overload
    def call(
        self, ask: Callable[[Hosted], Coroutine[Any, Any, T]], *, deadline_s: float | None = None
    ) -> Awaitable[list[T]]: ...
    @overload
    def call(self, ask: Callable[[Hosted], T], *, deadline_s: float | None = None) -> Awaitable[list[T]]: ...

    def call(self, ask: Callable[[Hosted], Any], *, deadline_s: float | None = None) -> Awaitable[list[Any]]:
        """Send one call to every actor at once, and wait for the results, in rank order."""
        request = record_call(ask)
        return self._gather([actor.call.remote(*request) for actor in self.present], request[0], deadline_s)

    @overload
    async def call_one(
        self, rank: int, ask: Callable[[Hosted], Coroutine[Any, Any, T]], *, what: str, deadline_s: float | None = None
    ) -> T: ...
    @overload
    async def call_one(
        self, rank: int, ask: Callable[[Hosted], T], *, what: str, deadline_s: float | None = None
    ) -> T: ...

    async def call_one(
        self, rank: int, ask: Callable[[Hosted], Any], *, what: str, deadline_s: float | None = None
    ) -> Any:
        """A call on one actor; `what` names the call in error messages."""
        answer, what = self.actors[rank].call.remote(*record_call(ask)), f"{self.name} {rank}, {what}"
        return await wait_for(answer, what=what, deadline_s=deadline_s or self.deadline_s, homes=self.homes)

    async def locate(self, *, deadline_s: float) -> list[Location]:
        self.locations = await self._gather([a.locate.remote() for a in self.actors], "locate", deadline_s)
        return self.locations

    def reorder(self, order: Sequence[int]) -> None:
        """Give the actors other ranks: rank r becomes the actor that was `order[r]`."""
        self.actors = [self.actors[i] for i in order]
        self.locations = [self.locations[i] for i in order]
        self.bundles = [self.bundles[i] for i in order]

    def replace(self, rank: int, new: ActorGroup[Any]) -> None:
        """Put the only actor of another group at a rank, in place of one that was lost."""
        self.actors[rank], self.locations[rank] = new.actors[0], new.locations[0]
        self.absent.discard(rank)

    async def build(self, arguments: Sequence[tuple[Any, ...]], *, deadline_s: float) -> None:
        """Construct all hosted objects at the same time; `arguments`: of `HostedActor.build`, by rank."""
        given = objects.sent()
        answers = [actor.build.remote(given, *own) for actor, own in zip(self.actors, arguments, strict=True)]
        await self._gather(answers, "start-up", deadline_s)
        self.built = True

    async def _gather(self, answers: list[Any], what: str, deadline_s: float | None) -> list[Any]:
        what, deadline_s = f"{self.name}.{what}", deadline_s or self.deadline_s
        try:
            return await wait_for(asyncio.gather(*answers), what=what, deadline_s=deadline_s, homes=self.homes)
        except ClusterError as error:
            if " is lost: " not in str(error) and (lost := await self._lost()):
                raise LostError(f"{what} failed: {', '.join(lost)} is lost: {error}") from error
            raise

    async def _lost(self) -> list[str]:
        """The names of dead actors: when a rank dies, a broken connection of another rank often fails first."""
        answers = [asyncio.ensure_future(actor.locate.remote()) for actor in self.actors]
        done, waiting = await asyncio.wait(answers, timeout=DEATH_NOTICE_S)
        for task in waiting:  # no answer yet: busy, so alive
            task.cancel()
        dead = {task for task in done if isinstance(task.exception(), RayActorError)}
        named = zip(answers, self.homes.values(), strict=False)  # none before they are located
        return [home for task, home in named if task in dead]

    async def end(self) -> None:
        """Let each actor close, then kill it; during start-up, kill it with its child processes."""
        with contextlib.suppress(ClusterError, ValueError):
            if self.built:
                await self._gather([a.call.remote("close") for a in self.present], "close", END_S)
            elif hasattr(self.actors[0], "end_children"):
                await self._gather([a.end_children.remote() for a in self.actors], "end_children", END_S)
        for actor in self.actors:
            ray.kill(actor)


def start_call(actors: Sequence[Any], rank: int, method: str, *arguments: Any) -> Callable[[], Any]:
    """Start a call from inside another actor. Returns a function that waits for the result."""
    ref = actors[rank].call.remote(method, *arguments)
    return lambda: ray.get(ref)


def check_address(address: str) -> None:
    """Raise ConnectionError if nothing listens at a cluster's `host:port`; Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():  # a Ray client's address, or auto
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(f"{host}, port {port}: {error.strerror or error}") from error
