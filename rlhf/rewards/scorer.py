"""The rewards as the training loop uses them: responses in, graded responses out.

Each part is a job of its own in the pool, so a part that hangs costs only its own share of the reward. A response is
scored as soon as it arrives, at the same time as any number of others.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from rlhf.answers.thoughts import Marks, opens_thought
from rlhf.config.data import USUAL_COLUMNS
from rlhf.config.printing import to_stderr
from rlhf.config.reward import VERIFIERS, CodeOptions, RewardConfig, RewardPart
from rlhf.processes.confinement import NOT_ALONE, Grants
from rlhf.processes.outside import BY_CLOCK
from rlhf.rewards.grade import (
    ANSWER_CLASSES,
    BAD_GOLD,
    DIED,
    FAILED,
    FAILURES,
    NO_ANSWER,
    NOT_JUDGED,
    OK,
    TIMEOUT,
    UNSCORABLE,
    WITH_EQUALITY,
    Grade,
    part_outcomes,
    too_large,
)
from rlhf.rewards.pool import Pool, default_workers, grants_of
from rlhf.rewards.rubric import Rubric, check_criteria, options_json, rubric_graders, rubric_options
from rlhf.types import Prompt, Rollout, ScoredRollout

MAX_CHECKS_AT_ONCE = 4096  # gold answers that are queued at the same time; a data set may have millions
COLUMNS_OF_CODE = {name: CodeOptions.model_fields[name].default for name in ("tests", "function")}


class BadGold(NamedTuple):
    """A row whose gold answer cannot be graded."""

    row: str
    answer: str
    reason: str


class Scorer(AbstractContextManager["Scorer"]):
    """Scores responses in processes that can be killed.

    Args:
        say: called from another thread with each line that user functions print.
        rubrics: what grades by each rubric, by `options_json`; None: the scorer asks the endpoints itself.

    Raises:
        ValueError: a user function cannot be imported, a variable or file that is granted to it does not exist, or the
            kernel cannot confine the code of responses.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        say: Callable[[str], None] = to_stderr,
        rubrics: Mapping[str, Rubric] | None = None,
    ) -> None:
        self.config = config
        by_grants: dict[Grants, list[RewardPart]] = {Grants(): []}
        for part in config.all_parts:
            by_grants.setdefault(grants_of(part), []).extend([part] if part.is_user_function else [])
        for grants in by_grants:
            grants.environment("reward")  # raises ValueError, before anything is started
        self._pools: dict[Grants, Pool] = {}
        self._rubrics: Mapping[str, Rubric] = {}
        limits = config.model_dump(include={"cpu_seconds", "wall_seconds", "memory_mb"})
        limits["workers"] = config.workers or default_workers()
        try:
            self._rubrics = rubric_graders(config) if rubrics is None else rubrics
            for grants, functions in by_grants.items():
                self._pools[grants] = Pool(**limits, user_functions=functions, say=say)
            if self.pool.unconfined and any(part.name == "code" for part in config.all_parts):
                raise ValueError(f"reward code: {NOT_ALONE}.")
        except BaseException:
            self.close()
            raise

    @property
    def pool(self) -> Pool:
        """The processes without any grants; built-in rewards run there."""
        return self._pools[Grants()]

    @property
    def warnings(self) -> tuple[str, ...]:
        """A message for each access that this kernel cannot forbid the grading processes."""
        return tuple(dict.fromkeys(warning for pool in self._pools.values() for warning in pool.warnings))

    @property
    def sources(self) -> dict[str, dict[str, str]]:
        """Fingerprints of the user functions' code: name -> file -> digest (`processes/code.py`)."""
        return {name: files for pool in self._pools.values() for name, files in pool.sources.items()}

    def close(self) -> None:
        """End every process."""
        for pool in self._pools.values():
            pool.close()
        for rubric in self._rubrics.values():
            rubric.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def score_group(
        self,
        prompt: Prompt,
        rollouts: Sequence[Rollout],
        texts: Sequence[str],
        marks: Marks | None = None,
        *,
        metric: str | None = None,
    ) -> tuple[ScoredRollout, ...]:
        """Grade the responses to one prompt: each by itself, or, where a part says `group`, all in one call.

        Args:
            marks: marks of the model's thoughts; None accepts the marks of every known model.
            metric: the metric of an evaluation; None in training. In an evaluation `extracted` is the answer that the
                metric's part reads, else that of the first other part by name, and equal answers get the same `vote`.
        """
        parts = self.config.parts_of(prompt.source)
        if metric is not None:  # the order of the parts in the config must not matter
            parts = tuple(sorted(parts, key=lambda part: (not f"{metric}/".startswith(f"{part.name}/"), part.name)))
        metadata = [_metadata(prompt, r.finish_reason, r.response_length) | _turn_metadata(prompt, r) for r in rollouts]
        of_trl = metadata
        if any(map(self._has_trl_signature, parts)):
            of_trl = [about | _trl_metadata(rollout) for about, rollout in zip(metadata, rollouts, strict=True)]

        async def grades_by(part: RewardPart) -> Sequence[Grade]:
            about = of_trl if self._has_trl_signature(part) else metadata
            futures = self._submit(part, self._jobs(part, texts, prompt.answer, prompt.columns, about, marks))
            return _grade_per_response(await asyncio.gather(*map(asyncio.wrap_future, futures)), len(texts))

        columns = await asyncio.gather(*map(grades_by, parts))
        grades = [self._combine(parts, [column[row] for column in columns], prompt.id) for row in range(len(texts))]
        vote_of = await self._votes(parts, columns) if metric is not None else {}
        return tuple(
            ScoredRollout(
                rollout, text, grade.extracted, grade.value, dict(grade.metrics), grade.status,
                vote_of.get(grade.extracted, grade.extracted), *part_outcomes(parts, grade),
            )
            for rollout, text, grade in zip(rollouts, texts, grades, strict=True)
        )  # fmt: skip

    async def _votes(self, parts: Sequence[RewardPart], columns: Sequence[Sequence[Grade]]) -> dict[str, str]:
        """Answer -> the first answer that equals it, as the part that extracted them compares; {} if it cannot."""
        read = [[*dict.fromkeys(grade.extracted for grade in column if grade.extracted)] for column in columns]
        part, answers = next((pair for pair in zip(parts, read, strict=True) if pair[1]), (None, []))
        if part is None or part.name not in WITH_EQUALITY or len(answers) < 2:
            return {}
        job = {"name": ANSWER_CLASSES, "part": part.name, "options": part.options, "answers": answers}
        classes = await asyncio.wrap_future(self.pool.submit(job))  # the group is empty if the job exceeded a limit
        return {answer: answers[int(one.value or 0)] for answer, one in zip(answers, classes.group, strict=False)}

    def try_functions(
        self, prompt: Prompt, responses: Sequence[str], rollout: Rollout | None = None
    ) -> dict[str, Grade]:
        """Try each function and rubric on the first response, or on all if it takes a group.

        Args:
            rollout: with an environment, a rollout; each response is taken as its last turn.

        Returns:
            Part name -> its first failed grade, or its first grade if no response got a value. Working parts are
            absent.
        """
        problems = {}
        for part in filter(lambda part: part.is_judged_outside, self.config.parts_of(prompt.source)):
            texts = responses if part.group or self._has_trl_signature(part) else responses[:1]
            metadata = [_metadata(prompt, "stop", len(text.split())) for text in texts]
            if rollout is not None:
                of_trl = _trl_metadata(rollout) if self._has_trl_signature(part) else {}
                for data, text in zip(metadata, texts, strict=True):
                    turns = ({"role": "assistant", "content": text},)
                    data |= _turn_metadata(prompt, replace(rollout, turns=turns)) | of_trl
            (future,) = self._submit(part, self._jobs(part, texts, prompt.answer, prompt.columns, metadata))
            grades = [
                self._within_bound([part], [grade], prompt.id)[0] for grade in _grade_per_response([future.result()], 1)
            ]
            failed = [grade for grade in grades if grade.status in FAILURES]
            if failed or all(grade.value is None for grade in grades):
                problems[part.name] = (failed or grades)[0]
        return problems

    def submit_batch(
        self,
        responses: Sequence[str],
        golds: Sequence[str | Sequence[str]],
        columns: Sequence[dict[str, Any]] | None = None,
    ) -> list[list[Future[Grade]]]:
        """Start to grade responses; returns one list of futures per part, for `graded_batch`.

        Args:
            golds: for each response, the gold answer or a list of acceptable answers.
        """
        rows = [
            ([text], gold if isinstance(gold, str) else json.dumps(list(gold)), row, [_no_metadata(text, row)])
            for text, gold, row in zip(responses, golds, columns or [{}] * len(golds), strict=True)
        ]
        return [self._submit(part, [j for row in rows for j in self._jobs(part, *row)]) for part in self.config.parts]

    def graded_batch(self, batches: Sequence[Sequence[Future[Grade]]], *, first_row: int = 0) -> list[Grade]:
        """Wait for the grades of `submit_batch`, in order. Errors number the rows from `first_row`."""
        return [
            self._combine(
                self.config.parts, [_grade_per_response([future.result()], 1)[0] for future in futures], f"row {row}"
            )
            for row, futures in enumerate(zip(*batches, strict=True), first_row)
        ]

    def check_gold(self, prompts: Iterable[Prompt]) -> list[BadGold]:
        """Grade every gold answer against itself; returns the rows where that fails."""
        pairs = (
            (prompt, part)
            for prompt in prompts
            for part in self.config.parts_of(prompt.source)
            if part.name in (*VERIFIERS, "rubric")
        )
        bad = []
        while batch := list(itertools.islice(pairs, MAX_CHECKS_AT_ONCE)):
            jobs = [
                {**self._jobs(part, [""], prompt.answer, prompt.columns, [_no_metadata("", {})])[0], "check": True}
                for prompt, part in batch
                if part.name != "rubric"
            ]
            futures = iter(self.pool.submit_many(jobs))
            for prompt, part in batch:
                is_rubric = part.name == "rubric"
                grade = check_criteria(prompt.columns, rubric_options(part)) if is_rubric else next(futures).result()
                if grade.status != OK or grade.value != 1.0:
                    reason = grade.detail or f"{grade.status}, graded {grade.value} against itself"
                    bad.append(BadGold(prompt.id, prompt.answer, f"{part.name}: {reason}"))
        return bad

    def _has_trl_signature(self, part: RewardPart) -> bool:
        """True for a function in TRL's signature, which takes a whole group."""
        return part.is_user_function and part.name in self._pools[grants_of(part)].groups

    def _jobs(
        self,
        part: RewardPart,
        texts: Sequence[str],
        answer: str,
        columns: dict[str, Any],
        metadata: Sequence[dict[str, Any]],
        marks: Marks | None = None,
    ) -> list[dict[str, Any]]:
        """The jobs by which one part grades the responses to one prompt: one per response, or one for the group."""
        job = {"name": part.name, "options": part.options, "answer": answer}
        if part.group or self._has_trl_signature(part):
            return [{**job, "columns": columns, "metadata": metadata, "responses": texts}]
        if part.name == "format":
            texts = [_with_thought(text, data) for text, data in zip(texts, metadata, strict=True)]
        pairs = zip(texts, metadata, strict=True)
        return [{**job, "response": text, **_job_inputs(part, columns, data, marks)} for text, data in pairs]

    def _submit(self, part: RewardPart, jobs: Sequence[dict[str, Any]]) -> list[Future[Grade]]:
        graders = self._rubrics[options_json(part)] if part.name == "rubric" else self._pools[grants_of(part)]
        return graders.submit_many(jobs)

    def _combine(self, parts: Sequence[RewardPart], grades: Sequence[Grade], row: str) -> Grade:
        """Combine the grades by all parts into the grade of one response; its `group` has them."""
        values: dict[str, float | None] = {}
        metrics: dict[str, float | None] = {}
        status, extracted, total, judged, unscorable = OK, "", 0.0, 0, False
        checked = self._within_bound(parts, grades, row)
        for part, grade in zip(parts, checked, strict=True):
            values[part.name] = value = _value(part, grade)
            metrics |= {f"{part.name}/{name}": number for name, number in grade.metrics.items()}
            total += part.weight * (value or 0.0)
            status = status if status != OK or grade.status == NOT_JUDGED else grade.status
            extracted = extracted or grade.extracted
            judged += grade.status != NOT_JUDGED
            unscorable |= value is None and grade.status != NOT_JUDGED
        if not judged:
            status = NOT_JUDGED
        reward = None if unscorable or status == NOT_JUDGED else total
        return Grade(reward, status, extracted, metrics=values | metrics, group=tuple(checked))

    def _within_bound(self, parts: Sequence[RewardPart], grades: Sequence[Grade], row: str) -> list[Grade]:
        """The grades; too large ones become failures. If a sum is too large, the part with the largest share fails."""
        shares = [part.weight * (grade.value or 0.0) for part, grade in zip(parts, grades, strict=True)]
        checked, judged = list(grades), [at for at, part in enumerate(parts) if part.is_judged_outside]
        largest = max(judged, key=lambda at: abs(shares[at]), default=None)
        for at in judged:
            total = max(shares[at], sum(shares), key=abs) if at == largest else shares[at]
            value, metrics = grades[at].value or 0.0, grades[at].metrics
            if problem := too_large(value, total, metrics, bound=self.config.bound, row=row):
                checked[at] = Grade(None, FAILED, grades[at].extracted, problem)
        return checked


def _value(part: RewardPart, grade: Grade) -> float | None:
    """The value of a part: 0 if a response made a built-in reward fail, None if a user function failed.

    A `code` job over the worker's limit by the clock is None too. Its tests have limits of their own, so it only waited
    for a core, which is not the response's fault.
    """
    if part.name == "code" and grade.status == TIMEOUT and BY_CLOCK in grade.detail:
        return None
    if grade.value is None and not part.is_judged_outside and grade.status in (NO_ANSWER, TIMEOUT, DIED, FAILED):
        return 0.0
    return None if grade.status in (UNSCORABLE, NOT_JUDGED, FAILED, BAD_GOLD) else grade.value


def _with_thought(text: str, metadata: dict[str, Any]) -> str:
    """The last message of a rollout with an environment, with its thought in <think> tags."""
    written = [turn for turn in metadata.get("turns", ()) if turn["role"] == "assistant"]
    thoughts = [f"<think>{turn['reasoning_content']}</think>" for turn in written[-1:] if "reasoning_content" in turn]
    return "".join([*thoughts, text])


def _job_inputs(
    part: RewardPart, columns: dict[str, Any], metadata: dict[str, Any], marks: Marks | None
) -> dict[str, Any]:
    """The inputs of a part besides response and answer; only those it reads, since small jobs are fast."""
    thoughts = {"marks": marks, "in_thought": metadata["in_thought"]}
    if part.is_judged_outside:
        return {"columns": columns, "metadata": metadata} | ({"marks": marks} if part.name == "rubric" else {})
    if part.name == "length":
        return {"metadata": {"response_length": metadata["response_length"]}}
    if part.name == "repetition":
        return {}
    if part.name == "code":
        named = [part.options.get(key, default) for key, default in COLUMNS_OF_CODE.items()]
        return {"columns": {name: columns.get(name) for name in named}, **thoughts}
    user_messages = [str(turn.get("content")) for turn in metadata["messages"] if turn.get("role") == "user"]
    return thoughts | ({"prompt": "".join(user_messages[-1:])} if part.name == "math" else {})


def _grade_per_response(grades: Sequence[Grade], responses: int) -> Sequence[Grade]:
    """One grade per response. If the call for a group failed, each of its responses gets that grade."""
    return grades[0].group or [*grades] * (responses // len(grades))


def _metadata(prompt: Prompt, finish_reason: str, response_length: int) -> dict[str, Any]:
    return {
        "prompt_id": prompt.id,
        "epoch": prompt.epoch,
        "source": prompt.source,
        "messages": prompt.messages,
        "prompt_is_text": prompt.is_text,
        "in_thought": prompt.in_thought,
        "finish_reason": finish_reason,
        "response_length": response_length,
    }


def _turn_metadata(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    """Metadata that only a rollout with an environment has; {} for other rollouts."""
    if rollout.outcome is None:
        return {}
    written = [turn for turn in rollout.turns if turn["role"] == "assistant"]
    in_thought = prompt.in_thought and not any("reasoning_content" in turn for turn in written[-1:])
    facts = {**rollout.facts, **rollout.outcome.facts}  # facts of the class win over ours
    opening = {} if rollout.opening is None else {"messages": rollout.opening}
    files = {} if rollout.outcome.files is None else {"files": rollout.outcome.files}
    return {"turns": rollout.turns, "facts": facts, "in_thought": in_thought, **opening, **files}


def _trl_metadata(rollout: Rollout) -> dict[str, Any]:
    """Metadata for functions in TRL's signature: token ids after the prompt, and attributes of the environment."""
    first = rollout.sequences[0]
    given: dict[str, Any] = {"completion_ids": first.token_ids[first.prompt_length :]}
    return given if rollout.outcome is None else {**given, "attributes": rollout.outcome.attributes}


def _no_metadata(text: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of a row of a file. There are no tokens, so its length is counted in words."""
    prompt = next((columns[name] for name in USUAL_COLUMNS["prompt_column"] if columns.get(name)), "")
    given_messages = [turn for turn in prompt if isinstance(turn, dict)] if isinstance(prompt, list) else []
    messages = given_messages or [{"role": "user", "content": str(prompt)}]
    is_rollout_row = columns.get("in_thought") is True and not columns.get("turns")  # a row of `rollouts/`
    return {
        "messages": messages,
        "prompt_is_text": isinstance(prompt, str),
        "in_thought": is_rollout_row or (isinstance(prompt, str) and opens_thought(prompt)),
        "finish_reason": "stop",
        "response_length": len(text.split()),
    }
