"""Log-probs of the tokens of a step by the teachers of a run, which the learners or servers over HTTP compute.

Each teacher gets the rows of its sources, with its hint between prompt and response if it reads one. Its log-probs of
the sampled tokens come back as one column of the step's own batch.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rlhf.algo.packing import pack
from rlhf.config.grpo import GRPOConfig
from rlhf.config.teacher import TeacherModel
from rlhf.data.messages import read_arguments, read_tools
from rlhf.data.templates import render, tokenize
from rlhf.rewards.http_client import MAX_REPLY_BYTES, HttpClient, RequestError
from rlhf.step.minibatches import plan_epochs
from rlhf.types import Prompt, RolloutGroup, StepBatch

MAX_TOKEN_BYTES = 1024  # of a reply, per token of the prompt


class TeacherLogprobs(NamedTuple):
    """Log-probs [N] float32 by the teachers, 0 in rows without a teacher, and the rows [B] bool that have one."""

    logprobs: np.ndarray
    rows: np.ndarray


def hinted_prompts(
    config: GRPOConfig, teacher: TeacherModel, prompts: Sequence[Prompt], tokenizer: Any
) -> dict[str, np.ndarray]:
    """Prompt id -> the token ids that a teacher reads: the prompt, with the row's hint after the last message.

    ValueError if a row has no hint, or is too long with it.
    """
    column, data, texts = teacher.hint_column or "", config.data, []
    for prompt in prompts:
        hint = prompt.columns.get(column)
        if not isinstance(hint, str) or not hint.strip():
            raise ValueError(
                f"algo.teacher.hint_column={column}: {prompt.id} has {hint!r} in this column, so the teacher "
                "would read the same prompt as the policy. Fill the column in every row, or name another column."
            )
        *before, last = prompt.messages
        messages = [*before, {**last, "content": f"{last['content']}\n\n{hint}"}]
        tools = read_tools(prompt.columns)
        arguments = read_arguments(prompt.columns, data.template_arguments)
        texts.append(render(messages, data.template, tokenizer, tools=tools, arguments=arguments))
    token_ids = dict(zip([p.id for p in prompts], tokenize(texts, data.template, tokenizer), strict=True))
    budget = config.row_tokens
    for name, ids in token_ids.items():
        if len(ids) + config.rollout.longest > budget:
            raise ValueError(
                f"algo.teacher.hint_column={column}: with it {name} has {len(ids)} tokens, and with a response "
                f"{len(ids) + config.rollout.longest}; {config.row_limit}. Raise the limit, or "
                "shorten the hints."
            )
    return token_ids


class Teachers:
    """The teachers of a run; nothing is started for them yet.

    `prompts` are those of data.train, by source. ValueError if a server has a different vocabulary, or a row no hint.
    """

    def __init__(self, config: GRPOConfig, prompts: Mapping[str, Sequence[Prompt]], tokenizer: Any) -> None:
        self._config = config
        self._by_source: dict[str, TeacherModel] = {}
        self._hinted: dict[str, np.ndarray] = {}
        teachers = config.algo.teacher
        if teachers is not None and not teachers.in_loss:  # in the loss the learners compare for themselves
            for source, rows in prompts.items():
                if (teacher := teachers.of_source(source)) is not None:
                    self._by_source[source] = teacher
                    self._hinted |= hinted_prompts(config, teacher, rows, tokenizer) if teacher.hint_column else {}
        self._servers: dict[str, Server] = {}
        for source, teacher in self._by_source.items():
            if teacher.endpoint is not None and teacher.endpoint not in self._servers:
                server = self._servers[teacher.endpoint] = Server(config, teacher.endpoint, tokenizer)
                try:  # ValueError if it has another vocabulary
                    asyncio.run(server.logprobs(prompts[source][0].token_ids.tolist()))
                except RequestError as error:
                    raise ValueError(str(error)) from None

    async def logprobs(
        self, groups: Sequence[RolloutGroup], batch: StepBatch, rows: np.ndarray, learners: Any, *, step: int
    ) -> TeacherLogprobs | None:
        """Log-probs of the sampled tokens of these rows [B] bool by their teachers; None without teachers.

        The ranks of the policy, `learners`, hold other microbatches afterwards: call `start_step` again.
        """
        if not self._by_source:
            return None
        prompts = [groups[group].prompt for group in batch.groups[batch.rollouts]]
        taught = TeacherLogprobs(np.zeros(len(batch.tokens.token_ids), np.float32), np.zeros(len(rows), bool))
        for teacher in {id(each): each for each in self._by_source.values()}.values():
            own_rows = np.array([self._by_source.get(prompt.source) is teacher for prompt in prompts], bool) & rows
            if not own_rows.any():
                continue
            read = self._with_hints(batch, prompts, np.flatnonzero(own_rows)) if teacher.hint_column else batch
            if teacher.endpoint is None:
                epochs = plan_epochs(read, self._config, step=step, rows_to_compute=own_rows)
                await learners.start_step(read, epochs[:1])
                (column,) = await learners.compute(lambda learner: learner.teacher_logprobs(teacher))  # noqa: B023
            else:
                column = await self._ask_server(teacher.endpoint, read, own_rows)
            taught.logprobs[_sampled(batch, own_rows)] = column[_sampled(read, own_rows)]
            taught.rows[own_rows] = True
        return taught

    def _with_hints(self, batch: StepBatch, prompts: Sequence[Prompt], rows: np.ndarray) -> StepBatch:
        """The batch with the hints in the prompts of these rows."""
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

    async def _ask_server(self, endpoint: str, batch: StepBatch, rows: np.ndarray) -> np.ndarray:
        """[N] float32 log-probs of the tokens of these rows, by a server."""
        server = self._servers[endpoint]
        bounds, column = batch.tokens.cu_seqlens, np.zeros(len(batch.tokens.token_ids), np.float32)
        spans = [slice(bounds[row], bounds[row + 1]) for row in np.flatnonzero(rows)]
        scored = await asyncio.gather(*(server.logprobs(batch.tokens.token_ids[span].tolist()) for span in spans))
        for span, values in zip(spans, scored, strict=True):
            column[span] = values
        return column


def _sampled(batch: StepBatch, rows: np.ndarray) -> np.ndarray:
    """[N] bool, True for the sampled tokens of these rows."""
    return batch.tokens.response_mask & np.repeat(rows, batch.tokens.lengths)


class Server:
    """An OpenAI-compatible server that gives log-probs of a prompt: completions with `echo` and `logprobs`."""

    def __init__(self, config: GRPOConfig, endpoint: str, tokenizer: Any) -> None:
        settings = config.algo.teacher
        assert settings is not None
        self._tokenizer, self._model = tokenizer, ""
        self._client = HttpClient(
            "algo.teacher.", "endpoint", endpoint,
            timeout_s=settings.timeout_s, retries=settings.retries, at_once=settings.concurrent_requests,
        )  # fmt: skip

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of these tokens at temperature 1; the first one is 0.

        RequestError if no try succeeded; ValueError if the server reads the ids as other tokens.
        """
        self._model = self._model or await self._client.ask(
            None, lambda reply: str(json.loads(reply)["data"][0]["id"]), path="models"
        )
        body = {"model": self._model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0}
        texts, logprobs = await self._client.ask(
            json.dumps({**body, "echo": True, "logprobs": 0}).encode(),
            lambda reply: _read(reply, len(token_ids)),
            path="completions",
            most_bytes=MAX_REPLY_BYTES + MAX_TOKEN_BYTES * len(token_ids),
        )
        for token, text in zip(token_ids, texts, strict=True):
            expected = self._tokenizer.decode([token])
            if expected != text and "\ufffd" not in expected:  # a part of a character has no text of its own
                raise ValueError(
                    f"{self._client.name}: different vocabulary: token {token} is {text!r} there and {expected!r} in "
                    "model.path. Serve a model with the same tokenizer."
                )
        return [0.0, *logprobs]


def _read(reply: bytes, count: int) -> tuple[list[str], list[float]]:
    """The texts of the tokens of a prompt, and the log-probs of all but the first one."""
    (choice,) = json.loads(reply)["choices"]
    texts, logprobs = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
    if not len(texts) == len(logprobs) == count + 1:  # one sampled token follows
        raise ValueError(f"{len(texts)} texts and {len(logprobs)} log-probs for {count} tokens and one more")
    if not all(map(math.isfinite, logprobs[1:count])):
        raise ValueError("a log-prob is not finite")
    return texts[:count], [float(value) for value in logprobs[1:count]]
