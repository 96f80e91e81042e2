"""Teachers of a run: which rows each reads, with which hint, by learners or over HTTP, and whose vocabulary fits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from worlds import make_config, rollout_of

from rlhf.cluster.actors import record_call
from rlhf.config.grpo import GRPOConfig
from rlhf.run.teachers import Teachers
from rlhf.step.batch import make_batch
from rlhf.types import Prompt, RolloutGroup, ScoredRollout

TOKENIZER = byte_tokenizer()
RESPONSES = ([50, 51], [52, 53, 54], [55], [56, 57])


def ids_of(text: str) -> np.ndarray:
    return np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)


def make_groups() -> list[RolloutGroup]:
    """A group of source `a`, and one of source `b`, of two rollouts each."""
    groups = []
    for number, source in enumerate("ab"):
        columns = {"hint": f"Think of {source}."}
        message = {"role": "user", "content": f"What is {source}?"}
        prompt = Prompt(f"{source}/1", 0, ids_of(message["content"]), (message,), "", source, columns)
        samples = []
        for sample in range(2):
            response = RESPONSES[2 * number + sample]
            mask = [0] * len(prompt.token_ids) + [1] * len(response)
            rollout = rollout_of([*prompt.token_ids, *response], mask, prompt_id=prompt.id, sample=sample)
            samples.append(ScoredRollout(rollout, "", "", float(sample), {}, "ok"))
        groups.append(RolloutGroup(prompt, tuple(samples)))
    return groups


def with_teacher(tmp_path: Path, **teacher: Any) -> GRPOConfig:
    data = {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "template": "raw", "max_prompt_tokens": 64}
    return make_config(
        tmp_path / "model", data=data, algo={"teacher": teacher}, learner={"max_tokens_per_microbatch": 256}
    )


class Learners:
    """Ranks whose log-prob of a token is minus its id over 100; they keep what each teacher was asked to read."""

    def __init__(self) -> None:
        self.read: list[tuple[str, list[list[int]]]] = []

    async def start_step(self, batch: Any, epochs: Any) -> None:
        self.batch, self.epochs = batch, epochs

    async def compute(self, ask: Callable[[Any], Any]) -> list[np.ndarray]:
        method, teacher = record_call(ask)
        assert method == "teacher_logprobs"
        tokens = self.batch.tokens
        rows = sorted(int(r) for minibatch in self.epochs[0] for part in minibatch.microbatches[0] for r in part)
        spans = [tokens.token_ids[tokens.cu_seqlens[r] : tokens.cu_seqlens[r + 1]].tolist() for r in rows]
        self.read.append((teacher.path or teacher.own, spans))
        column = np.zeros(len(tokens.token_ids), np.float32)
        index = tokens.token_indices(np.array(rows))
        column[index] = -tokens.token_ids[index] / 100
        return [column]


def taught(
    config: GRPOConfig, learners: Any, groups: list[RolloutGroup], *, started: Callable[[], None] = lambda: None
) -> tuple[list[np.ndarray], list[bool]]:
    """What the teachers say of each response, and which rows have one; `started` is called before they are asked."""
    batch = make_batch(groups, mask_truncated=False)
    prompts = {group.prompt.source: [group.prompt] for group in groups}
    teachers = Teachers(config, prompts, TOKENIZER)
    started()
    result = asyncio.run(teachers.logprobs(groups, batch, batch.trained_rows, learners, step=0))
    assert result is not None
    of_rows = np.split(result.logprobs, batch.tokens.cu_seqlens[1:-1])
    masks = np.split(batch.tokens.response_mask, batch.tokens.cu_seqlens[1:-1])
    assert not result.logprobs[~batch.tokens.response_mask].any()
    return [column[mask] for column, mask in zip(of_rows, masks, strict=True)], result.rows.tolist()


def expected(row: int) -> Any:
    return pytest.approx(-np.array(RESPONSES[row]) / 100)


def test_each_source_is_read_by_its_own_teacher_and_a_source_without_one_by_none(tmp_path: Path) -> None:
    learners, groups = Learners(), make_groups()
    said, rows = taught(with_teacher(tmp_path, path="x", by_source={"b": {"path": "y"}}), learners, groups)
    assert [who for who, _ in learners.read] == ["x", "y"]
    assert [len(read) for _, read in learners.read] == [2, 2]
    assert rows == [True] * 4
    assert all(column == expected(row) for row, column in enumerate(said))
    learners = Learners()
    said, rows = taught(with_teacher(tmp_path, reward="add", by_source={"b": {"path": "y"}}), learners, groups)
    assert rows == [False, False, True, True]
    assert not said[0].any()
    assert said[3] == expected(3)


def test_a_teacher_reads_its_hint_before_the_same_sampled_tokens(tmp_path: Path) -> None:
    learners = Learners()
    said, _ = taught(with_teacher(tmp_path, own="policy", hint_column="hint"), learners, make_groups())
    ((who, read),) = learners.read
    assert who == "policy"
    assert read[2] == [*ids_of("What is b?\n\nThink of b.").tolist(), *RESPONSES[2]]
    assert all(column == expected(row) for row, column in enumerate(said))


def test_a_row_without_its_hint_or_too_long_with_it_is_refused_by_name(tmp_path: Path) -> None:
    groups = make_groups()
    prompt = groups[1].prompt
    for columns, parts in (
        ({}, ("None", "Fill the column in every row")),
        ({"hint": "x" * 200}, ("max_tokens_per", "shorten")),
    ):
        groups[1] = RolloutGroup(replace(prompt, columns=columns), groups[1].samples)
        with pytest.raises(ValueError, match=r"algo\.teacher\.hint_column=hint: .*b/1") as refused:
            taught(with_teacher(tmp_path, own="policy", hint_column="hint"), Learners(), groups)
        assert all(part in str(refused.value) for part in parts)


class Completions(BaseHTTPRequestHandler):
    """Echoes prompts with log-probs of minus the id over 100; the first request fails."""

    failures = 1
    asked: ClassVar[list[dict[str, Any]]] = []
    shift = 0

    def _reply(self, body: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if type(self).failures:
            type(self).failures -= 1
            self.send_error(503)
            return
        self.asked.append(body)
        ids = [*body["prompt"], 65]
        texts = [TOKENIZER.decode([token + self.shift]) for token in ids]
        logprobs = {"tokens": texts, "token_logprobs": [None, *(-token / 100 for token in ids[1:])]}
        self._reply({"choices": [{"logprobs": logprobs}]})

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("rlhf.rewards.http_client.FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(Completions, "failures", 1)
    monkeypatch.setattr(Completions, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_server_is_asked_for_the_log_probs_of_exactly_the_tokens_and_again_if_it_fails(
    tmp_path: Path, endpoint: str
) -> None:
    groups = make_groups()
    said, rows = taught(with_teacher(tmp_path, endpoint=endpoint), None, groups, started=Completions.asked.clear)
    assert rows == [True] * 4
    assert all(column == expected(row) for row, column in enumerate(said))
    sequences = [s.token_ids.tolist() for g in groups for x in g.samples for s in x.rollout.sequences]
    assert sorted(body["prompt"] for body in Completions.asked) == sorted(sequences)
    assert {(body["model"], body["echo"], body["temperature"]) for body in Completions.asked} == {("served", True, 1.0)}


def test_a_server_with_another_vocabulary_or_without_answers_ends_the_run_with_its_address(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Completions, "shift", 1)
    with pytest.raises(ValueError, match=rf"algo\.teacher\.endpoint={endpoint}: different vocabulary: token \d+"):
        taught(with_teacher(tmp_path, endpoint=endpoint), None, make_groups())
    monkeypatch.setattr(Completions, "shift", 0)
    failed = rf"algo\.teacher\.endpoint={endpoint}: 2 tries failed.*503"
    config = with_teacher(tmp_path, endpoint=endpoint, retries=1)
    with pytest.raises(RuntimeError, match=failed):
        taught(config, None, make_groups(), started=lambda: setattr(Completions, "failures", 10**6))
    with pytest.raises(ValueError, match=failed):  # at the start, before anything is loaded
        taught(config, None, make_groups())
