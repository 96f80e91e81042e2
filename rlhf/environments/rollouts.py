"""What a rollout asks of its environment: a session, the prompt after `reset`, and a way to run a program."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.answers.thoughts import opens_thought
from rlhf.config.grpo import GRPOConfig
from rlhf.data.dialogue import Dialogue
from rlhf.environments import turns
from rlhf.environments.branches import Play
from rlhf.environments.endpoint import Endpoint
from rlhf.environments.hosts import Hosts
from rlhf.environments.sessions import HostedSession
from rlhf.sampling.requests import Parsing
from rlhf.types import Prompt, Rollout

RESET_S = 30.0  # limit of a reset in the trial of rewards before a run
MAX_ERRORS, MAX_WARNINGS = 5, 10  # errors shown when a run ends; warnings about errors in a run
REPAIR_TOOL = "Repair the tool; if the call is wrong, let it raise a ValueError that says why: the model reads it."
END_TOKENS = 64  # last tokens of a prompt in which a thought may be opened


@dataclass(eq=False, repr=False)
class Environments:
    """Opens a session for each rollout, and makes its prompt."""

    config: GRPOConfig
    hosts: Hosts  # the processes of this node
    dialogue: Dialogue  # the template of the conversations
    parsing: Parsing  # how the engines read tool calls in responses
    tokenizer: Any  # decodes the end of a prompt that `reset` made
    endpoint: Endpoint | None = None  # where programs reach the model; None without programs

    async def open(self, prompt: Prompt, sample: int) -> HostedSession:
        """Reset the environment for a rollout. Raises CallLimitError or FailedError.

        Members of a group start in the same state; a resumed run repeats the seeds.
        """
        key = f"{self.config.run.seed}/{prompt.epoch}/{prompt.id}"
        group = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest())
        return await self.hosts.open(row_for_reset(prompt), {"group": group, "sample": sample})

    def runner(self, session: HostedSession) -> Play:
        """How to run a coroutine, or a program behind the endpoint."""
        if (endpoint := self.endpoint) is not None and session.is_program:
            return lambda branches: endpoint.play(branches, session.run)
        return lambda branches: session.play(branches.answer)

    def prompt_after_reset(self, prompt: Prompt, session: HostedSession) -> Prompt:
        """The prompt with the session's tools and the text of its reset. Raises FailedError if it cannot be used."""
        messages = messages_after_reset(prompt, session.opening, session.text, self.config)
        turns.check_size(messages, most=self.config.data.max_prompt_tokens, key="data.max_prompt_tokens")
        try:
            token_ids = self.dialogue.prompt(messages, session.tools)
        except Exception as error:  # a template may raise anything about a message
            raise turns.FailedError(f"the prompt that reset made cannot be rendered: {error}") from None
        if len(token_ids) > (longest := self.config.data.max_prompt_tokens):
            raise turns.FailedError(
                f"the prompt has {len(token_ids)} tokens after reset, more than data.max_prompt_tokens={longest}. "
                "Raise it, or shorten the text of reset and the descriptions of the tools."
            )
        end = self.tokenizer.decode(token_ids[-END_TOKENS:].tolist(), skip_special_tokens=False)
        in_thought = opens_thought(end, self.parsing.marks)
        return replace(prompt, messages=tuple(messages), token_ids=token_ids, in_thought=in_thought)


def row_for_reset(prompt: Prompt) -> dict[str, Any]:
    """The row for `reset`: its columns, and the messages of its prompt, if it has one, as `prompt`.

    That of a prompt without a row is its `number`, from 1, in the `split` (train, eval), and the `epoch`, from 0.
    """
    epoch = {"epoch": prompt.epoch} if prompt.columns.keys() == {"number", "split"} else {}
    return {**prompt.columns, **epoch, **({"prompt": list(prompt.messages)} if prompt.messages else {})}


async def rollout_with_answer(
    hosts: Hosts, prompt: Prompt, text: str, config: GRPOConfig
) -> tuple[Prompt, Rollout] | None:
    """The prompt after reset, and the rollout of a model that answers with this text and calls no tool.

    None for coroutines and programs, which need a model, and if the environment fails.
    """
    progress = turns.Progress(messages=[{"role": "assistant", "content": text}], turns=1)
    try:
        session = await asyncio.wait_for(hosts.open(row_for_reset(prompt), {"group": 0, "sample": 0}), RESET_S)
        try:
            if session.plays:
                return None
            messages = messages_after_reset(prompt, session.opening, session.text, config)
            rollout = progress.rollout(prompt, 0, [turns.prompt_only_sequence(prompt)], await session.finish())
            return replace(prompt, messages=tuple(messages)), rollout
        finally:
            await session.close()
    except (turns.CallLimitError, turns.FailedError, TimeoutError):
        return None


def messages_after_reset(
    prompt: Prompt, opening: Sequence[turns.Message] | None, text: str, config: GRPOConfig
) -> list[turns.Message]:
    """The messages of the prompt after reset. Raises FailedError if neither the row nor reset has a prompt."""
    messages = [dict(message) for message in (prompt.messages if opening is None else opening)]
    if text and messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += text
    elif text:
        messages.append({"role": "user", "content": text})
    if not messages:
        raise turns.FailedError("the row has no prompt, and reset returned none. Return a text from reset.")
    if config.data.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.data.system_prompt})
    return messages


class FailedEnvironments:
    """Counts the rollouts of a step whose environment failed, by error; `allowed_fraction` of them may fail."""

    def __init__(self, allowed_fraction: float) -> None:
        self._allowed_fraction = allowed_fraction
        self._warned = set[str]()

    def check(self, rollouts: Sequence[Rollout]) -> tuple[list[str], str]:
        """Warnings about new errors in the rollouts of a step; and the reason to end the run, or an empty string."""
        outcomes = [rollout.outcome for rollout in rollouts if rollout.outcome is not None]
        errors = Counter(" ".join(outcome.error.split()) for outcome in outcomes if outcome.status == turns.FAILED)
        faults = Counter[str]()
        for rollout in rollouts:
            faults.update(rollout.facts.get("tool_faults"))
        texts = [f"{errors[error]} of {len(rollouts)} rollouts failed: {error}" for error in self._new(errors)]
        for fault in self._new(faults):
            tool, _, error = fault.partition(": ")
            texts.append(f"the tool {tool} failed ({faults[fault]} x): {error.removesuffix('.')}. {REPAIR_TOOL}")
        warnings = [f"environment: {each}" for each in texts]
        if not errors or errors.total() <= self._allowed_fraction * len(rollouts):
            return warnings, ""
        shown = "\n".join(f"  {count} x {error}" for error, count in errors.most_common(MAX_ERRORS))
        return warnings, (
            f"environment: {errors.total()} of {len(rollouts)} rollouts of a step failed, more than "
            f"environment.max_failed_fraction={self._allowed_fraction:g} allows:\n{shown}\nRepair the environment, or "
            "raise the fraction."
        )

    def _new(self, errors: Iterable[str]) -> list[str]:
        """Errors that no warning has named yet, as long as a run has few warnings."""
        new = [error for error in errors if error not in self._warned][: MAX_WARNINGS - len(self._warned)]
        self._warned.update(new)
        return new
