"""The rewards that a config can name, and calls of user functions. Runs in the workers of the pool."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import math
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

from rlhf.answers.extract import alternatives, gold_answer
from rlhf.answers.thoughts import answer_of, marks_from_json
from rlhf.config.printing import say
from rlhf.config.reward import FLOAT32_MAX, OPTIONS_OF_REWARD, USER_FIELDS
from rlhf.processes.attributes import EnvironmentView
from rlhf.processes.code import import_problem, load_module
from rlhf.processes.outside import over_clock
from rlhf.processes.raised import location_of, user_error_text
from rlhf.processes.returned import read_returned
from rlhf.rewards.code import code_reward
from rlhf.rewards.grade import ANSWER_CLASSES, FAILED, NOT_JUDGED, OK, TIMEOUT, UNSCORABLE, Grade
from rlhf.rewards.math import check_gold, math_reward, says_the_same
from rlhf.rewards.refusal import refusing_side_effects
from rlhf.rewards.shaping import length_reward, repetition_reward
from rlhf.rewards.simple import exact_reward, f1_reward, format_reward, gsm8k_reward, multiple_choice_reward
from rlhf.rewards.trl_rewards import Judged, as_completion, has_trl_signature, judge

# name -> function(job, options)
REWARDS: dict[str, Callable[[dict[str, Any], Any], Grade]] = {
    "math": lambda job, options: math_reward(job["response"], job["answer"], options, job.get("prompt", "")),
    "gsm8k": lambda job, options: gsm8k_reward(job["response"], job["answer"]),
    "multiple_choice": lambda job, options: multiple_choice_reward(job["response"], job["answer"], options),
    "exact": lambda job, options: exact_reward(job["response"], job["answer"], options),
    "f1": lambda job, options: f1_reward(job["response"], job["answer"], options),
    "format": lambda job, options: Grade(format_reward(job["response"], options, **job["thoughts"])),
    "length": lambda job, options: Grade(length_reward(job["metadata"]["response_length"], options)),
    "repetition": lambda job, options: Grade(repetition_reward(job["response"], options)),
    "code": lambda job, options: code_reward(job["response"], job["columns"], options, *job["time"]),
}
GRADES_WHOLE_RESPONSE = ("format", "length", "repetition")  # other rewards see the answer without the thoughts

NO_DEBUGGER = (
    "A grading process has no terminal, so no debugger can run in it. Call the function from a script of your own, or "
    "print(): the lines reach the log. `rlhf score FILE --reward NAME` tries it on a file"
)
AS_GROUP = "Set `group: true` next to its name if it takes all responses to a prompt and returns a list, as TRL's do"


def run(job: dict[str, Any], functions: dict[str, Callable[..., Any]]) -> Grade:
    """Grade one response by one reward.

    Args:
        job: name, options, response, answer, columns, metadata. With `check`, the gold answer is graded against itself.
            `in_thought` and the `marks` of thoughts tell where the answer begins; without marks, those of every known
            model count. `code` also has `time`: seconds for all tests, and a function to call before each test.
        functions: user functions by name.
    """
    name = job["name"]
    if name in functions:
        return call_user_function(functions[name], job)
    if name == ANSWER_CLASSES:
        return answer_classes(job)
    options = _options(name, json.dumps(job["options"]))
    job = {**job, "thoughts": {"marks": marks_from_json(job.get("marks")), "in_thought": job.get("in_thought", False)}}
    try:
        if name not in GRADES_WHOLE_RESPONSE:
            job["response"] = answer_of(job["response"], **job["thoughts"]) or ""
        if name == "code":  # it starts processes
            return REWARDS[name]({**job, "response": None} if job.get("check") else job, options)
        with refusing_side_effects():
            jobs = [{**job, "answer": answer} for answer in alternatives(job["answer"])]
            if not job.get("check"):
                return max((REWARDS[name](one, options) for one in jobs), key=_sort_value)
            if name == "math":
                return min((check_gold(one["answer"]) for one in jobs), key=_sort_value)
            return min((REWARDS[name](with_gold_as_response(one), options) for one in jobs), key=_sort_value)
    except MemoryError:
        raise
    except Exception as error:  # caused by the text of the response, so only this response fails
        return Grade(None, FAILED, detail=f"{type(error).__name__}: {error}")


def answer_classes(job: dict[str, Any]) -> Grade:
    """Find equal answers, as one part of the reward compares them.

    Two answers are equal if either is right where the other is the gold answer. For math, they need not be worked out.

    Args:
        job: part, options, answers.

    Returns:
        A grade whose `group` has, for each answer, the index of the first answer that it equals.
    """
    part, answers = job["part"], job["answers"]
    options = _options(part, json.dumps(job["options"]))

    def accepts(stated: str, gold: str) -> bool:
        job = {**with_gold_as_response({"name": part, "answer": stated}), "answer": gold}
        return REWARDS[part](job, options).value == 1.0

    def same(a: str, b: str) -> bool:
        try:
            return says_the_same(a, b, options) if part == "math" else accepts(a, b) or accepts(b, a)
        except MemoryError:
            raise
        except Exception:  # the text of an answer caused it
            return False

    firsts: list[int] = []
    with refusing_side_effects():
        for number, answer in enumerate(answers):
            known = (first for first in dict.fromkeys(firsts) if same(answer, answers[first]))
            firsts.append(next(known, number))
    return Grade(None, group=tuple(Grade(float(first)) for first in firsts))


def _sort_value(grade: Grade) -> float:
    return -math.inf if grade.value is None else grade.value


@lru_cache(maxsize=64)
def _options(name: str, written: str) -> Any:
    return OPTIONS_OF_REWARD[name].model_validate_json(written)


def with_gold_as_response(job: dict[str, Any]) -> dict[str, Any]:
    """The job with its gold answer as the response, in the form that the reward reads."""
    gold = gold_answer(job["answer"]) or ""
    return {**job, "response": f"\\boxed{{{gold}}}" if job["name"] != "gsm8k" else f"#### {gold}"}


def load_user_function(part: dict[str, Any]) -> Callable[..., Any]:
    """Import the function of a `RewardPart` and check that it can be called; ValueError with the reason if not."""
    name = part["name"]
    module_name, _, attribute = name.rpartition(":")
    try:
        module = load_module(name)
    except BaseException as error:
        raise ValueError(f"reward name={name!r}: {import_problem(name, error, is_reward=True)}.") from None
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"reward name={name!r}: {module_name} has no function {attribute}. Correct the name.")
    if has_trl_signature(function):
        if part["options"]:
            given = ", ".join(part["options"])
            raise ValueError(f"reward name={name!r}: {given}: no key, and TRL's functions get no options. Remove it.")
        return function
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C without a signature
        return function
    for option in part["options"].keys() - signature.parameters.keys():
        if meant := difflib.get_close_matches(option, ("weight", *USER_FIELDS), n=1, cutoff=0.8):
            remedy = f"Did you mean {meant[0]}? An option of this name has to be an argument of {attribute}."
            raise ValueError(f"reward name={name!r}: {option}: there is no such key. {remedy}")
    try:
        signature.bind("", answer="", columns={}, metadata={}, **part["options"])
    except TypeError as error:
        first = "responses" if part["group"] else "response"
        raise ValueError(
            f"reward name={name!r}: {attribute}{signature} cannot be called: {error}. It gets "
            f"({', '.join([first, 'answer=, columns=, metadata=', *part['options']])}); add **_ for what it ignores."
        ) from None
    return function


def waits(function: Callable[..., Any]) -> bool:
    """True for an `async def` function, of which many calls can wait at the same time."""
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # an object with an asynchronous __call__
    )


def _call(function: Callable[..., Any], job: dict[str, Any]) -> Any:
    if has_trl_signature(function):
        return _judge(function, job)
    given = {name: job[name] for name in ("answer", "columns", "metadata")}
    return function(job["responses"] if "responses" in job else job["response"], **given, **job["options"])


def _judge(function: Callable[..., Any], job: dict[str, Any]) -> Any:
    """The coroutine of a call in TRL's signature, with texts if the prompt is a text, else with messages."""
    metadata = job["metadata"]
    prompts, completions = [data["messages"] for data in metadata], job["responses"]
    if metadata[0]["prompt_is_text"] and "turns" not in metadata[0]:
        prompts = ["".join(message["content"] for message in messages[-1:]) for messages in prompts]
    else:
        pairs = zip(completions, metadata, strict=True)
        turns = (data.get("turns") or [{"role": "assistant", "content": text}] for text, data in pairs)
        completions = [as_completion(said) for said in turns]
    views = [EnvironmentView(data["attributes"]) for data in metadata if data.get("attributes")]
    return judge(
        function,
        prompts=prompts,
        completions=completions,
        completion_ids=[data.get("completion_ids", ()) for data in metadata],
        rows=[job["columns"]] * len(metadata),
        environments=views if len(views) == len(metadata) else None,
    )


async def _graded(function: Callable[..., Any], job: dict[str, Any]) -> Grade:
    """The grade of a call, whose result may have to be awaited."""
    try:
        result = _call(function, job)
        return _grade(function, await result if inspect.isawaitable(result) else result, job)
    except (asyncio.CancelledError, MemoryError):
        raise
    except BaseException as error:
        return _failed_grade(function, error)


def call_user_function(function: Callable[..., Any], job: dict[str, Any]) -> Grade:
    """Call `function(response, answer=, columns=, metadata=, **options)`, which must not wait, and check its result."""
    call = _graded(function, job)
    try:
        call.send(None)
    except StopIteration as end:
        grade: Grade = end.value
        return grade
    except asyncio.CancelledError as error:
        return _failed_grade(function, error)
    call.close()
    return _failed_grade(function, RuntimeError("it waits. Write `async def`."))


async def call_waiting_function(function: Callable[..., Any], job: dict[str, Any], wall_seconds: float) -> Grade:
    """Await one call for at most `wall_seconds`. A call that ignores its cancellation is abandoned."""
    task = asyncio.ensure_future(_graded(function, job))
    if not (await asyncio.wait({task}, timeout=wall_seconds))[0]:
        task.cancel()
        return Grade(None, TIMEOUT, detail=over_clock(wall_seconds))
    return _failed_grade(function, "CancelledError: it cancelled its own call") if task.cancelled() else task.result()


def _grade(function: Callable[..., Any], result: Any, job: dict[str, Any]) -> Grade:
    """The grade of a function's result, for one response or for a group."""
    if "responses" not in job:
        return _grade_of_response(function, result)
    if isinstance(result, Judged):
        numbers = {name: [x for x in values if abs(x) <= FLOAT32_MAX] for name, values in result.metrics.items()}
        logged = {name: sum(values) / len(values) for name, values in numbers.items() if values}
        grades = (Grade(value, NOT_JUDGED if value is None else OK, metrics=logged) for value in result.rewards)
        return Grade(None, OK, group=tuple(grades))
    if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != len(job["responses"]):
        returned = f"{len(result)} values" if isinstance(result, Sequence) else type(result).__name__
        return _failed_grade(function, f"returned {returned} for a group of {len(job['responses'])}")
    return Grade(None, OK, group=tuple(_grade_of_response(function, one) for one in result))


def _grade_of_response(function: Callable[..., Any], result: Any) -> Grade:
    if isinstance(result, list | tuple):
        if len(result) != 1:
            return _failed_grade(function, f"returned {len(result)} values for one response. {AS_GROUP}")
        result = result[0]
    try:
        returned = read_returned(result, finite=True)
    except (TypeError, ValueError) as error:
        return _failed_grade(function, str(error))
    predicted = returned.others.pop("pred", None)  # verl's name for the extracted answer
    for name in returned.others:
        _say_once(f"reward: {name!r}, which a function returned next to score, is not a number, and is not logged")
    status = UNSCORABLE if returned.score is None else OK
    return Grade(returned.score, status, "" if predicted is None else str(predicted), metrics=returned.numbers)


_say_once = cache(say)  # once per process


def _failed_grade(function: Callable[..., Any], problem: str | BaseException) -> Grade:
    """A failed grade: `file:line: problem`, at the innermost line of user code, or at the function's definition."""
    location = ""
    if isinstance(problem, BaseException):
        location = location_of(problem)
        problem = user_error_text(problem, NO_DEBUGGER if isinstance(problem, BdbQuit) else "")
    unwrapped = inspect.unwrap(function)
    if not location and inspect.isfunction(unwrapped):
        location = f"{unwrapped.__code__.co_filename}:{unwrapped.__code__.co_firstlineno}: "
    return Grade(None, FAILED, detail=location + problem)
