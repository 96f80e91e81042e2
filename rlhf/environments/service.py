"""A service as an environment: for each rollout the worker asks it, it runs an agent and answers with the reward.

    {"row", "seed", "timeout_s", "openai_base_url", "anthropic_base_url", "key"} ── POST ──> service ──> agents
                                    reward, as a program leaves it in its file <── 200 ──       └─> endpoint

A request is retried only if no connection was made: a second agent with the same key would write into the same
rollout. Each rollout has a connection of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlhf.config.environment import EnvironmentPart
from rlhf.environments.program import TIMEOUT_S, read_reward
from rlhf.environments.turns import CallLimitError, FailedError
from rlhf.processes.channel import as_json
from rlhf.rewards.http_client import HttpClient, LateError, RequestError, UnconnectedError

RETRIES = 5  # after a connection that was not made


class Service:
    """The client of one service, which runs `at_once` rollouts at the same time; others wait.

    Raises ValueError if the environment variable with its key is not set.
    """

    def __init__(self, part: EnvironmentPart, at_once: int) -> None:
        assert part.url is not None, "the config has checked it"
        self._timeout_s = part.timeout_s or TIMEOUT_S
        self._client = HttpClient(
            "environment.", "url", part.url, timeout_s=self._timeout_s, retries=RETRIES, at_once=at_once,
            key_variable_name=part.key_variable_name, retry_on=UnconnectedError,
        )  # fmt: skip

    async def play(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Have the service run a rollout; returns its reward.

        Raises CallLimitError without an answer in time, and FailedError without a connection or without a reward.
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
            return await self._client.ask(body, lambda reply: read_reward(reply, "the answer"))
        except LateError as error:
            raise CallLimitError(str(error)) from None
        except RequestError as error:
            raise FailedError(str(error)) from None
