"""A service as an environment: it is asked for each rollout, runs an agent of its own, and answers with the reward.

    {"row", "seed", "timeout_s", "openai_base_url", "anthropic_base_url", "key"} ── POST ──> service ──> agents
                                    reward, as a program leaves it in its file <── 200 ──       └─> endpoint

A request is tried again only while no connection was made: a second agent with the same key would write into the same
rollout. The driver asks by itself; a rollout has a connection of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from rlhf.config.environment import EnvironmentPart
from rlhf.config.printing import printable
from rlhf.environments.program import MAX_REWARD_BYTES, SHOWN_BYTES, TIMEOUT_S, reward_in
from rlhf.environments.turns import CallLimitError, FailedError
from rlhf.processes.channel import as_json
from rlhf.rewards.model_client import FIRST_WAIT_S, address_and_headers
from rlhf.rewards.patience import patiently

CONNECT_S, RETRIES = 30.0, 5  # of a connection; further tries after one that was not made
NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class Service:
    """The client of one service.

    Args:
        at_once: rollouts that it is asked for at the same time; others wait.

    Raises:
        ValueError: the environment variable with its key is not set.
    """

    def __init__(self, part: EnvironmentPart, at_once: int) -> None:
        assert part.url is not None, "the config has checked it"
        self._url, self._headers = address_and_headers(part.url, part.key_variable_name, section="environment.")
        self._timeout_s = part.timeout_s or TIMEOUT_S
        self._places = asyncio.Semaphore(at_once)

    async def play(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What the service says of the rollout that it has run.

        Raises:
            CallLimitError: it did not answer in time.
            FailedError: it was not reached, answered with an error or no reward, or hung up.
        """
        endpoint = message["endpoint"]
        asked = {
            "row": message["row"],
            "seed": message["seeds"]["group"],
            "timeout_s": self._timeout_s,
            "openai_base_url": f"{endpoint['url']}/v1",
            "anthropic_base_url": endpoint["url"],
            "key": endpoint["key"],
        }
        body = json.dumps(asked, default=as_json).encode()
        try:
            async with self._places:
                answer = await patiently(
                    lambda: self._post(body), retries=RETRIES, first_wait_s=FIRST_WAIT_S, retry_on=NOT_CONNECTED
                )
            return reward_in(answer, "the answer")
        except (aiohttp.ClientError, ValueError) as error:  # a time-out of the connection is one of the first kind
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise FailedError(printable(f"environment.url={self._url}: {' '.join(said.split())}")) from None
        except TimeoutError:
            limit = f"over {self._timeout_s:g} seconds by the clock (environment.timeout_s)"
            raise CallLimitError(limit) from None

    async def _post(self, body: bytes) -> bytes:
        """The beginning of the answer, up to one byte more than a reward may have."""
        connect = min(CONNECT_S, self._timeout_s / 2)  # the first to end: then the model is not to blame
        times = aiohttp.ClientTimeout(total=self._timeout_s, connect=connect)
        async with (
            aiohttp.ClientSession(timeout=times, auto_decompress=False) as session,
            session.post(self._url, data=body, headers=self._headers, allow_redirects=False) as reply,
        ):
            most = MAX_REWARD_BYTES if reply.status == 200 else SHOWN_BYTES
            answer = b""
            while len(answer) <= most and (more := await reply.content.read(most)):
                answer += more
        if reply.status != 200:
            raise ValueError(f"HTTP status {reply.status}: {answer[:most].decode(errors='replace')}")
        return answer
