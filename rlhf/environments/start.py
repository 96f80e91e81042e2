"""The environments of a run or an evaluation, checked and started."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from rlhf.config.data import USUAL_COLUMNS
from rlhf.config.environment import ALL, SERVICE
from rlhf.config.grpo import GRPOConfig
from rlhf.config.parsers import tool_parser_of
from rlhf.config.printing import to_stderr
from rlhf.config.reward import CodeOptions
from rlhf.data.dialogue import Dialogue
from rlhf.data.load import LoadedPrompts, with_rows
from rlhf.data.messages import read_request
from rlhf.data.templates import template_source
from rlhf.data.thoughts import marks_of
from rlhf.data.turns import stop_token_ids
from rlhf.environments.endpoint import Endpoint
from rlhf.environments.hosts import Hosts
from rlhf.environments.rollouts import Environments
from rlhf.environments.service import Service
from rlhf.environments.sessions import HostedSession
from rlhf.environments.turns import FailedError
from rlhf.sampling.requests import Parsing
from rlhf.types import Prompt


class StartedEnvironments(Environments, contextlib.AbstractContextManager["StartedEnvironments"]):
    """Environments with their processes on this node; leaving the context ends the processes.

    `say` receives the printed lines of environments, from another thread. Raises ValueError if a class or function
    cannot be loaded, the template cannot continue after a turn, nothing would judge the rollouts, the key of a service
    is missing, or the endpoint's address does not exist here.

    `alone`: see `Hosts`.
    """

    def __init__(
        self, config: GRPOConfig, tokenizer: Any, *, say: Callable[[str], None] = to_stderr, alone: bool = True
    ) -> None:
        endpoint = Endpoint(config, say) if config.environment.uses_endpoint else None
        with contextlib.ExitStack() as opened:
            if endpoint is not None:
                opened.callback(endpoint.close)
            port = endpoint.port if endpoint else 0
            answers = answer_columns(config)
            hosts = Hosts(config.environment, config.tools, say=say, port=port, answers=answers, alone=alone)
            opened.callback(hosts.close)
            hosts.services = {
                value: Service(part, config.environment.processes).play
                for value, part in config.environment.parts.items()
                if part.name == SERVICE
            }
            tools = {tool["function"]["name"]: tool for each in hosts.about.values() for tool in each["tools"]}
            self.tools = [*tools.values()]  # one for each name
            self._check(config, hosts)
            data = config.data
            stops = stop_token_ids(config.model.path, tokenizer)
            dialogue = Dialogue(tokenizer, data.template, data.template_arguments, stop_ids=stops)
            tool_parser = None
            with contextlib.suppress(*[] if self.tools else [ValueError]):  # coroutines may have none
                tool_parser = tool_parser_of(template_source(data.template, tokenizer), config.rollout.tool_parser)
            # about the template, and about restrictions that this kernel cannot enforce
            self.warnings = (*dialogue.check(self.tools), *hosts.warnings)
            self.close = opened.pop_all().close  # ends every process
        marks = marks_of(tokenizer, data.template)
        parsing = Parsing(tool_parser, tuple(self.tools), data.chat_template_kwargs, marks)
        super().__init__(config, hosts, dialogue, parsing, tokenizer, endpoint)

    @staticmethod
    def _check(config: GRPOConfig, hosts: Hosts) -> None:
        kinds, reward = config.environment.trained_sequences, config.reward
        if kinds != ALL and not any(about["plays"] for about in hosts.about.values()):
            raise ValueError(
                f"environment.trained_sequences={list(kinds)}: the key applies to coroutines, programs and services "
                "only; a rollout with a class or tools is one sequence. Remove the key."
            )
        if not (reward.leaves_something_ungraded and config.learns_from_rewards) or config.reward_model is not None:
            return
        for value, about in hosts.about.items():
            if not about["rewards"]:
                where = f"environment.by_name.{value}" if value else "the environment"
                raise ValueError(
                    f"reward=[]: {where} has no get_reward, so nothing would judge its rollouts. Add the method, or "
                    "name a reward, such as [{name: math}]."
                )

    def with_rows(self, which: Literal["train", "eval"], loaded: LoadedPrompts) -> LoadedPrompts:
        """The prompts, with as many made ones as the environment says that it has problems. ValueError: too few."""
        (about, *_) = self.hosts.about.values()
        return with_rows(self.config.data, which, loaded, about["rows"].get(which))

    async def first_prompt(self, prompt: Prompt) -> Prompt:
        """The prompt as the model will get it, from a session. Raises ValueError if it cannot be made or used."""
        try:
            session = await self.open(prompt, 0)
            try:
                if not session.plays:
                    return self.prompt_after_reset(prompt, session)
                if not session.is_program and (shown := await self._first_request(session)):
                    return replace(prompt, **shown)
            finally:
                await session.close()
        except FailedError as error:
            raise ValueError(f"environment: it fails for {prompt.id}: {error}") from None
        if len(prompt.token_ids):
            return prompt
        return replace(prompt, token_ids=self.dialogue.prompt([{"role": "user", "content": "Begin."}]).astype(np.int32))

    async def _first_request(self, session: HostedSession) -> dict[str, Any]:
        """The messages that a coroutine first asks for a turn with, and their tokens; empty if they are too long."""
        asked: list[Mapping[str, Any]] = []

        async def no_turn(request: Mapping[str, Any]) -> dict[str, Any]:
            asked.append(request)
            raise FailedError("no turn is sampled for the first prompt that is shown")

        try:
            await session.play(no_turn)
        except FailedError:
            if not asked:
                raise
        if not (messages := asked and asked[0].get("messages")):  # ids, or nothing
            return {}
        try:
            messages = read_request(messages)
            token_ids = self.dialogue.prompt(messages, asked[0]["tools"])
        except Exception:  # a template may raise anything; the rollouts say what
            return {}
        fits = len(token_ids) <= self.config.data.max_prompt_tokens
        return {"messages": tuple(messages), "token_ids": token_ids} if fits else {}

    def __exit__(self, *_: object) -> None:
        self.close()


def answer_columns(config: GRPOConfig) -> list[str]:
    """Columns with answers, tests or criteria, in lower case: the configured names and the usual names."""
    names = [*USUAL_COLUMNS["answer_column"], config.data.answer_column]
    names += [source.answer_column for source in (*config.data.train, *config.data.eval)]
    graded = [(part.name, part.options) for part in config.reward.all_parts]
    names += [options.get("tests", CodeOptions().tests) for name, options in graded if name == "code"]
    names += [options.get("criteria_column") for name, options in graded if name == "rubric"]
    return sorted({part for name in filter(None, names) for part in (name.lower(), name.lower().partition(".")[0])})
