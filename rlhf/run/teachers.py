"""What the teachers of a run say of the tokens of a step: by the learners, or by servers over HTTP.

Each teacher gets the rows of its sources, with its hint between prompt and response where it reads one. What it says of
the sampled tokens comes back as one column of the step's own batch.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError

import numpy as np

from rlhf.algo.packing import pack
from rlhf.config.grpo import GRPOConfig
from rlhf.config.teacher import TeacherModel
from rlhf.data.messages import read_arguments, read_tools
from rlhf.data.templates import render, tokenize
from rlhf.rewards.model_client import FIRST_WAIT_S, address_and_headers
from rlhf.rewards.patience import patiently
from rlhf.step.minibatches import plan_epochs
from rlhf.types import Prompt, RolloutGroup, StepBatch

ERRORS = (OSError, HTTPException, json.JSONDecodeError, KeyError, TypeError, IndexError)  # another try may succeed
LATER = (408, 429)  # the only errors of a client that pass by themselves
MAX_REASON = 500  # bytes


class Taught(NamedTuple):
    """Log-probs [N] float32 of the teachers, 0 where there is none, and the rows [B] bool that have one."""

    logprobs: np.ndarray
    rows: np.ndarray


def with_hints(
    config: GRPOConfig, teacher: TeacherModel, prompts: Sequence[Prompt], tokenizer: Any
) -> dict[str, np.ndarray]:
    """The token ids of prompts as a teacher reads them, by their id: its hint follows the last message.

    Raises:
        ValueError: a row has no hint, or is too long with it.
    """
    column, data, texts = teacher.hint_column or "", config.data, []
    for prompt in prompts:
        hint = prompt.columns.get(column)
        if not isinstance(hint, str) or not hint.strip():
            raise ValueError(
                f"algo.teacher.hint_column={column}: {prompt.id} has {hint!r} there, and its teacher would read what "
                "the policy reads. Give each row a text, or name another column."
            )
        *before, last = prompt.messages
        messages = [*before, {**last, "content": f"{last['content']}\n\n{hint}"}]
        tools = read_tools(prompt.columns)
        arguments = read_arguments(prompt.columns, data.template_arguments)
        texts.append(render(messages, data.template, tokenizer, tools=tools, arguments=arguments))
    token_ids = dict(zip([p.id for p in prompts], tokenize(texts, data.template, tokenizer), strict=True))
    budget = config.learner.max_tokens_per_microbatch
    for name, ids in token_ids.items():
        if len(ids) + config.rollout.longest > budget:
            raise ValueError(
                f"algo.teacher.hint_column={column}: with it {name} has {len(ids)} tokens, and with a response "
                f"{len(ids) + config.rollout.longest}; learner.max_tokens_per_microbatch={budget}. Raise that, or "
                "shorten the hints."
            )
    return token_ids


class Teachers:
    """The teachers of a run; nothing is started for them yet.

    Args:
        prompts: of data.train, by source.

    Raises:
        ValueError: a server has another vocabulary, or a row has no hint.
    """

    def __init__(self, config: GRPOConfig, prompts: Mapping[str, Sequence[Prompt]], tokenizer: Any) -> None:
        self._config = config
        self._of: dict[str, TeacherModel] = {}
        self._hinted: dict[str, np.ndarray] = {}
        teachers = config.algo.teacher
        if teachers is not None and not teachers.in_loss:  # in the loss the learners compare for themselves
            for source, rows in prompts.items():
                if (teacher := teachers.of(source)) is not None:
                    self._of[source] = teacher
                    self._hinted |= with_hints(config, teacher, rows, tokenizer) if teacher.hint_column else {}
        self._servers: dict[str, Server] = {}
        for source, teacher in self._of.items():
            if teacher.endpoint is not None and teacher.endpoint not in self._servers:
                self._servers[teacher.endpoint] = Server(config, teacher.endpoint, tokenizer)
                self._servers[teacher.endpoint].check(prompts[source][0].token_ids.tolist())

    async def logprobs(
        self, groups: Sequence[RolloutGroup], batch: StepBatch, rows: np.ndarray, learners: Any, *, step: int
    ) -> Taught | None:
        """What the teachers say of the sampled tokens of these rows [B] bool; None without teachers.

        Args:
            learners: the ranks of the policy. They then hold other microbatches: `start_step` must follow.
        """
        if not self._of:
            return None
        prompts = [groups[group].prompt for group in batch.groups[batch.rollouts]]
        taught = Taught(np.zeros(len(batch.tokens.token_ids), np.float32), np.zeros(len(rows), bool))
        for teacher in {id(each): each for each in self._of.values()}.values():
            own = np.array([self._of.get(prompt.source) is teacher for prompt in prompts], bool) & rows
            if not own.any():
                continue
            read = self._as_read(batch, prompts, np.flatnonzero(own)) if teacher.hint_column else batch
            if teacher.endpoint is None:
                epochs = plan_epochs(read, self._config, step=step, rows_to_compute=own)
                await learners.start_step(read, epochs[:1])
                (column,) = await learners.compute("teacher_logprobs", teacher)
            else:
                column = await self._served(teacher.endpoint, read, own)
            here, there = _sampled(batch, own), _sampled(read, own)
            taught.logprobs[here], taught.rows[own] = column[there], True
        return taught

    def _as_read(self, batch: StepBatch, prompts: Sequence[Prompt], rows: np.ndarray) -> StepBatch:
        """The batch with the hinted prompts of these rows."""
        tokens, bounds = batch.tokens, batch.tokens.cu_seqlens
        heads = batch.prompt_lengths.copy()
        ids, masks = (np.split(column, bounds[1:-1]) for column in (tokens.token_ids, tokens.response_mask))
        for row in rows.tolist():
            hinted, first = self._hinted[prompts[row].id], heads[row]
            ids[row] = np.concatenate([hinted, ids[row][first:]])
            masks[row] = np.concatenate([np.zeros(len(hinted), bool), masks[row][first:]])
            heads[row] = len(hinted)
        packed = replace(pack(ids, masks), rollout_tokens=tokens.rollout_tokens)
        return replace(batch, tokens=packed, prompt_lengths=heads)

    async def _served(self, endpoint: str, batch: StepBatch, rows: np.ndarray) -> np.ndarray:
        """[N] float32 log-probs by a server at the tokens of these rows."""
        server = self._servers[endpoint]
        bounds, column = batch.tokens.cu_seqlens, np.zeros(len(batch.tokens.token_ids), np.float32)
        spans = [slice(bounds[row], bounds[row + 1]) for row in np.flatnonzero(rows)]
        scored = await asyncio.gather(*(server.logprobs(batch.tokens.token_ids[span].tolist()) for span in spans))
        for span, values in zip(spans, scored, strict=True):
            column[span] = values
        return column


def _sampled(batch: StepBatch, rows: np.ndarray) -> np.ndarray:
    """[N] bool, the sampled tokens of these rows."""
    return batch.tokens.response_mask & np.repeat(rows, batch.tokens.lengths)


class Server:
    """An OpenAI-compatible server that gives log-probs of a prompt: completions with `echo` and `logprobs`."""

    def __init__(self, config: GRPOConfig, endpoint: str, tokenizer: Any) -> None:
        assert config.algo.teacher is not None
        self._settings, self._tokenizer = config.algo.teacher, tokenizer
        self._url, self._headers = address_and_headers(endpoint.rstrip("/"))
        self._threads = ThreadPoolExecutor(self._settings.concurrent_requests)
        self._model = ""

    def check(self, token_ids: Sequence[int]) -> None:
        """Ask for the log-probs of a prompt; ValueError if they do not come, or are those of other tokens."""
        try:
            asyncio.run(self.logprobs(token_ids))
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of these tokens, that of the first is 0.

        Raises:
            RuntimeError: no try succeeded. ValueError: the server reads the ids as other tokens.
        """
        loop = asyncio.get_running_loop()
        try:
            return await patiently(
                lambda: loop.run_in_executor(self._threads, self._ask, token_ids),
                retries=self._settings.retries, first_wait_s=FIRST_WAIT_S, retry_on=ERRORS,
            )  # fmt: skip
        except ERRORS as error:
            raise RuntimeError(
                f"algo.teacher.endpoint={self._url}: {self._settings.retries + 1} tries failed, the last with "
                f"{type(error).__name__}: {error}. See whether it runs and gives log-probs of prompts (completions "
                f"with echo); algo.teacher.timeout_s={self._settings.timeout_s:g} bounds one request."
            ) from None

    def _ask(self, token_ids: Sequence[int]) -> list[float]:
        self._model = self._model or self._fetch("models", None)["data"][0]["id"]
        body = {"model": self._model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0}
        (choice,) = self._fetch("completions", {**body, "echo": True, "logprobs": 0})["choices"]
        count, given = len(token_ids), choice["logprobs"]  # one sampled token follows
        if len(given["token_logprobs"]) != count + 1:
            raise IndexError(f"{len(given['token_logprobs'])} log-probs for {count} tokens and one more")
        self._check_tokens(token_ids, given["tokens"][:count])
        return [0.0, *map(float, given["token_logprobs"][1:count])]

    def _check_tokens(self, token_ids: Sequence[int], texts: Sequence[str]) -> None:
        for token, text in zip(token_ids, texts, strict=True):
            own = self._tokenizer.decode([token])
            if own != text and "\ufffd" not in own:  # a part of a character has no text of its own
                raise ValueError(
                    f"algo.teacher.endpoint={self._url}: different vocabulary: token {token} is {text!r} there "
                    f"and {own!r} in model.path. Serve a model with the same tokenizer."
                )

    def _fetch(self, what: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{what}", data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._settings.timeout_s) as reply:
                return json.load(reply)
        except HTTPError as error:
            if 400 <= error.code < 500 and error.code not in LATER:
                reason = " ".join(error.read(MAX_REASON).decode(errors="replace").split())
                raise ValueError(f"algo.teacher.endpoint={self._url}: {error.code} {error.reason}: {reason}") from None
            raise
