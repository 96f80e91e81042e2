"""What waits for an actor: cancelled, it ends at once and says nothing."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from rlhf.cluster.actors import LostError, wait_for


def test_a_cancellation_that_comes_together_with_the_answer_is_not_lost() -> None:
    async def scenario() -> None:
        answer = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(wait_for(answer, what="learner.update", deadline_s=60))
        await asyncio.sleep(0)
        answer.set_result(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(scenario())


def test_calls_to_several_actors_that_are_cancelled_print_nothing_later(log_records: list[logging.LogRecord]) -> None:
    async def scenario() -> None:
        answers = asyncio.gather(asyncio.sleep(60), asyncio.sleep(60))
        waiting = asyncio.ensure_future(wait_for(answers, what="engine.start-up", deadline_s=60))
        del answers
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(scenario())
    gc.collect()
    assert [record.getMessage() for record in log_records] == []


def test_an_answer_that_does_not_come_names_the_call_and_the_deadline() -> None:
    with pytest.raises(LostError, match=r"learner\.update.* 0 s"):
        asyncio.run(wait_for(asyncio.sleep(60), what="learner.update", deadline_s=0.001))
