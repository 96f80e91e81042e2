"""A cluster whose use ends because something failed beside it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from worlds import make_config

from rlhf.cluster.actors import LostError
from rlhf.cluster.cluster import Cluster


class Empty(Cluster):
    """Without Ray."""

    async def _start(self) -> None:
        pass


def test_a_user_that_waits_for_weights_hears_the_end_though_a_new_engine_is_joining(tmp_path: Path) -> None:
    async def use() -> None:
        async with Empty(make_config(tmp_path / "model", run={"dir": str(tmp_path)})) as cluster:
            weights, joined = asyncio.Condition(), asyncio.Event()

            async def join() -> None:
                await joined.wait()
                async with weights:
                    cluster.end_with(LostError("the transfer failed"))
                    await asyncio.sleep(1000)  # a call that nobody answers

            cluster.background(join())
            async with weights:
                joined.set()
                await weights.wait_for(lambda: False)  # lets go, and has it back before it may end

    with pytest.raises(LostError, match="the transfer failed"):
        asyncio.run(asyncio.wait_for(use(), 60))


def test_an_error_of_background_work_ends_the_use(tmp_path: Path) -> None:
    async def fail() -> None:
        raise OSError("stdout is closed")

    async def use() -> None:
        async with Empty(make_config(tmp_path / "model", run={"dir": str(tmp_path)})) as cluster:
            cluster.background(fail())
            await asyncio.sleep(1000)

    with pytest.raises(OSError, match="stdout is closed"):
        asyncio.run(asyncio.wait_for(use(), 60))
