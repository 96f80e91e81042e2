"""Environments of the tests of processes: TRL's contract, well behaved and hostile."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import time
from typing import Any


class Guess:
    """Guess a number; the state is drawn by `random`."""

    def reset(self, **row: Any) -> str:
        self.secret = random.randrange(1000)
        self.row, self.score, self.hints = row, 0.0, 0
        print("a line that the game prints")
        return f" secret below 1000, not {self.secret + 1}"

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        self.score = float(number == self.secret)
        return f"right {random.random():.4f}" if self.score else "wrong"

    def get_reward(self) -> float:
        return self.score


class Crowded:
    """Sessions on a server with two places, as OpenEnv's: an instance keeps its own until it is closed."""

    taken = 0

    def __init__(self) -> None:
        self.has_place = False

    async def reset(self, **_: Any) -> None:
        if not self.has_place and Crowded.taken >= 2:
            raise RuntimeError("Server error: Server at capacity: 2/2 sessions active. (code: CAPACITY_REACHED)")
        Crowded.taken += not self.has_place
        self.has_place = True

    async def play(self) -> str:
        """Play."""
        await asyncio.sleep(0.05)
        return "played"

    def close(self) -> None:
        Crowded.taken -= self.has_place


class AlwaysFull:
    async def reset(self, **_: Any) -> None:
        raise RuntimeError("Server error: Server at capacity: 1/1 sessions active. (code: CAPACITY_REACHED)")

    async def play(self) -> str:
        """Play."""
        return "played"


class Slow:
    """A coroutine environment."""

    def __init__(self, pause: float = 0.01) -> None:
        self.pause = pause

    async def reset(self, **_: Any) -> None:
        self.calls = 0

    async def wait(self, how: str = "") -> str:
        """Wait.

        Args:
            how: Which way.
        """
        self.calls += 1
        if how == "for ever":
            await asyncio.sleep(1000)
        await asyncio.sleep(self.pause)
        return f"waited in {os.getpid()}"

    async def get_reward(self) -> dict[str, float]:
        return {"score": 1.0, "calls": float(self.calls)}


class Broken:
    """An environment whose own code fails."""

    def reset(self, where: str = "", **_: Any) -> None:
        self.where = where
        if where == "reset":
            raise ValueError("no board")

    def act(self) -> str:
        """Act."""
        return "acted"

    def get_reward(self) -> float:
        if self.where == "get_reward":
            raise KeyError("score")
        return 1.0


class Bomb:
    """A tool whose processes all have a file open, so that a test finds them."""

    def __init__(self, path: str) -> None:
        self._path = path

    def reset(self, **_: Any) -> None:
        pass

    def act(self, how: str) -> str:
        """Act.

        Args:
            how: What to do.
        """
        self._file = open(self._path)  # noqa: SIM115
        match how:
            case "tree":  # 256 processes
                for _ in range(8):
                    os.fork()
                time.sleep(1000)
            case "chain":  # each process starts the next one and ends
                if os.fork() == 0:
                    for _ in range(100_000):
                        if os.fork() != 0:
                            os._exit(0)
                time.sleep(1000)
            case "few":
                if os.fork() == 0:
                    os.setsid()
                    os.fork()
                    time.sleep(1000)
            case "ended":  # processes whose parents have ended before them
                os.system("for n in $(seq 100); do (true &); sleep 0.02; done")
                time.sleep(0.5)
        return "acted"


class Hostile:
    """Tools that do what tools must not."""

    def reset(self, **_: Any) -> None:
        pass

    def act(self, how: str) -> str:
        """Act.

        Args:
            how: What to do.
        """
        match how:
            case "raise":
                raise RuntimeError("out of order")
            case "hang":
                time.sleep(1000)
            case "spin":
                while True:
                    pass
            case "fork":
                while True:
                    if os.fork() == 0:
                        time.sleep(1000)
            case "big":
                return "x" * 10_000_000
            case "bytes":
                return b"\xff\xfe".decode("utf-8", "surrogateescape")
            case "marks":
                return "<|im_end|><|endoftext|>"
            case "exit":
                sys.exit(3)
            case "die":
                os._exit(3)
            case "memory":
                return str(len([bytearray(2**24) for _ in range(10**6)]))
            case "loop":
                return asyncio.run(asyncio.sleep(0, "looped"))
        return "acted"

    def get_reward(self) -> float:
        return 1.0


class Escapes:
    """A coroutine environment that raises what is no Exception, or says what JSON cannot."""

    async def reset(self, how: str = "") -> None:
        self.facts = {"number": 10**5000 if how == "number" else 1}
        match how:
            case "exit":
                sys.exit(3)
            case "network":
                socket.create_connection(("127.0.0.1", 9))
            case "cancel":
                raise asyncio.CancelledError
            case "unprintable":
                raise ValueError("\udcff")

    async def act(self) -> str:
        """Act."""
        return str(os.getpid())


class Closes:
    """Writes down how often it was closed; the first call breaks it."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def reset(self, fails: bool = False) -> None:
        if fails:
            raise ValueError("no session")

    async def act(self) -> str:
        """Act."""
        return "acted"

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        with open(self.path, "a") as file:
            file.write("closed\n")


class Untyped:
    """A tool without a type hint."""

    def reset(self, **_: Any) -> None:
        pass

    def act(self, how) -> str:  # type: ignore[no-untyped-def]
        """Act.

        Args:
            how: What to do.
        """
        return str(how)


class NeverScored:
    """A game whose score is never there."""

    def reset(self, **_: Any) -> str:
        return "guess"

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        return "no"

    def get_reward(self) -> float:
        raise KeyError("score")


async def debate(row: dict[str, Any], generate: Any) -> dict[str, Any]:
    """Two turns, and a branch of the second."""
    question = {"role": "user", "content": row.get("question", "q")}
    first = await generate([question])
    if row.get("fails"):
        raise ValueError("no debate")
    if row.get("exits"):
        sys.exit(3)
    more = [question, first, {"role": "user", "content": "more"}]
    turns = await asyncio.gather(generate(more), generate(more))
    return {"score": float(len(turns)), "draw": random.random(), "said": chr(0xD800)}


async def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Other.
    """
    return a + b


def asked_for(prompts: list[list[dict[str, str]]], completions: list[Any], **_: Any) -> list[float]:
    """A reward in TRL's signature: whether the prompt asks for maze b."""
    return [float(messages[-1]["content"] == "maze b") for messages in prompts]
