"""The `reward` section: which rewards grade a response, by data source, and limits of the processes that run them.

Two spellings mean the same. A list names the parts; a mapping adds settings and other parts for some sources:

    reward: [{name: math, weight: 1.0}, {name: format, weight: 0.1, style: think}]
    reward: {parts: [{name: math}], by_source: {gsm8k: [{name: gsm8k}]}, workers: 16}

Keys of a part other than `name` and `weight` are options of that reward.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self, get_args

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from rlhf.config.base import (
    USER_CODE,
    FilePath,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Section,
    key,
    short_value,
    suggest,
)
from rlhf.config.load import validated

ExtractionStep = Literal["box", "answer_tag", "hash", "answer_is", "math_span", "last_number"]

STEPS_OF_MODE: dict[str, tuple[ExtractionStep, ...]] = {"strict": ("box",), "lenient": get_args(ExtractionStep)}


class Tolerance(Section):
    """How far a number may be from the gold answer; a number that rounds to a gold decimal is always near enough."""

    relative: float = key(0.0, "share of the gold answer", ge=0, lt=1)
    absolute: NonNegative = key(0.0, "in the unit of the gold answer")


class MathOptions(Section):
    """A math answer, found in the response and compared with the gold answer."""

    mode: Literal["strict", "lenient"] = key("strict", "strict takes a boxed answer only, lenient any stated answer")
    extract: tuple[ExtractionStep, ...] | None = key(None, "where to look, in order; null: by mode", strict=False)
    tolerance: Tolerance | None = key(None, "{relative, absolute} distance of a right number; null: none")
    evaluated: bool | None = key(None, "whether an answer must be worked out: 7, not 3+4; null: in strict mode")
    decimal_comma: bool = key(False, "read 3,5 and 1.234 in an answer as 3.5 and 1234, as in many languages")

    @property
    def steps(self) -> tuple[ExtractionStep, ...]:
        return self.extract if self.extract is not None else STEPS_OF_MODE[self.mode]

    @property
    def must_be_evaluated(self) -> bool:
        return self.evaluated if self.evaluated is not None else self.mode == "strict"


class Gsm8kOptions(Section):
    """The number after the last `####`, compared as mathematics."""


class MultipleChoiceOptions(Section):
    """The letter of the chosen option."""

    letters: str = key("ABCDEFGHIJ", "the letters that name options", min_length=2)


class ExactOptions(Section):
    """The whole answer as a string, in one spelling."""

    ignore_case: bool = key(True, "upper and lower case count as equal")


class F1Options(Section):
    """Overlap of the words of answer and gold."""

    threshold: float | None = key(None, "give 1 at this F1 or above, else 0; null: F1 itself", gt=0, le=1)


class FormatOptions(Section):
    """The form of the response, whatever it answers."""

    style: Literal["think", "think_answer", "boxed"] = key(
        "think_answer", "<think>..</think> first; also <answer>..</answer> last; exactly one box"
    )
    pattern: str | None = key(None, "regular expression for the whole response, in place of a style")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression ({error}). Correct it.") from None
        return value


class LengthOptions(Section):
    """0 within the bounds; outside them it falls linearly to -1 over the buffer."""

    min_tokens: NonNegativeInt = key(0, "shortest response without a penalty, tokens")
    max_tokens: PositiveInt | None = key(None, "longest response allowed, tokens; null: no upper bound")
    buffer_tokens: NonNegativeInt = key(0, "tokens before a bound over which the penalty grows")

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.max_tokens is not None and self.min_tokens + self.buffer_tokens > self.max_tokens:
            raise ValueError("min_tokens + buffer_tokens exceed max_tokens: every length has a penalty. Lower them.")
        return self


class RepetitionOptions(Section):
    """A penalty: the share of word n-grams that occurred before."""

    ngram: PositiveInt = key(8, "words in an n-gram; characters, in scripts without spaces")
    free_fraction: float = key(0.1, "share of repeated n-grams that costs nothing", ge=0, lt=1)


FLOAT32_MAX = 3.4028234663852886e38  # advantages are in float32
WALL_PER_CPU = 2  # a test of `code` that sleeps may take this times its CPU seconds


class CodeOptions(Section):
    """Tests of the row against the Python code of the response, which runs confined."""

    tests: str = key("tests", "column with asserts, a HumanEval check, or pairs of input and output")
    function: str = key("entry_point", "column with the name of the tested function, where the tests do not say it")
    mode: Literal["all", "fraction"] = key("all", "1 if all tests pass, else 0; or the fraction that passes")
    whole_response: bool = key(False, "without a fenced block, take the whole response as code")
    tolerance: float = key(1e-6, "absolute or relative error of an output that is expected as a decimal", ge=0, lt=1)
    cpu_seconds: PositiveFloat = key(2.0, "CPU seconds of one test; twice as many by the clock")


class Criterion(Section):
    """One thing that a response is graded by."""

    text: str = Field(description="what a good response does", min_length=1)
    weight: float = key(1.0, "share of this criterion, relative to the others", gt=0, le=1e9)


class RubricOptions(Section):
    """A model behind an OpenAI-compatible endpoint grades by criteria."""

    url: str = Field(description="address, as in http://HOST:8000/v1/chat/completions", pattern="^https?://")
    model: str = Field(description="name of the model there", min_length=1)
    criteria: tuple[Criterion, ...] = key((), "list of {text, weight}; the value is their weighted mean", strict=False)
    criteria_column: str | None = key(None, "column with the criteria of the row, in place of criteria")
    key_variable_name: str | None = key(None, "environment variable of the run that holds the key of the endpoint")
    retries: NonNegativeInt = key(3, "further tries of a request that fails")
    timeout_s: PositiveFloat = key(60.0, "seconds that a request may wait for its answer")
    requests_at_once: PositiveInt = key(32, "requests at the same time")
    max_new_tokens: PositiveInt = key(512, "longest answer of the grader, tokens")
    max_requests: PositiveInt | None = key(None, "requests of the program, after which it ends; null: no bound")
    max_tokens: PositiveInt | None = key(None, "prompt and answer tokens after which the program ends; null: no bound")

    @model_validator(mode="after")
    def _one_kind_of_criteria(self) -> Self:
        if bool(self.criteria) == (self.criteria_column is not None):
            raise ValueError("set exactly one of criteria, [{text: ..., weight: 1.0}], and criteria_column.")
        return self


OPTIONS_OF_REWARD: dict[str, type[Section]] = {
    "math": MathOptions,
    "gsm8k": Gsm8kOptions,
    "multiple_choice": MultipleChoiceOptions,
    "exact": ExactOptions,
    "f1": F1Options,
    "format": FormatOptions,
    "length": LengthOptions,
    "repetition": RepetitionOptions,
    "code": CodeOptions,
    "rubric": RubricOptions,
}

VERIFIERS = ("math", "gsm8k", "multiple_choice", "exact", "f1", "code")  # these compare with an answer, or with tests
WITHOUT_ANSWER = ("format", "length", "repetition", "code", "rubric")  # these ignore the gold answer
ENVIRONMENT_PART, MODEL_PART = "environment", "reward_model"  # parts of the reward that `reward` does not list
GRANTS = ("env", "network", "files")  # what a user function may reach
NOT_AN_ACCURACY = ("length", "repetition", MODEL_PART)  # 0 and 1 mean neither wrong nor right
USER_FIELDS = ("group", "concurrency", *GRANTS)


def logged_name(part: str) -> str:
    """The name of a part in metrics: without the folders of an absolute path, or `__main__`."""
    return re.sub(r"^/(?:[^/]*/)*(?=[^/]*\.py:)|^__main__:", "", part)


class RewardPart(Section):
    """One summand of the reward."""

    name: FilePath = Field(
        description=f"{', '.join(OPTIONS_OF_REWARD)}, your_package.your_module:your_function or a/file.py:your_function"
    )
    weight: float = key(1.0, "factor of this part in the sum")
    options: dict[str, Any] = key({}, "options of this reward")
    group: bool = key(False, "your function gets all responses to a prompt at once, and returns a list")
    concurrency: PositiveInt = key(128, "calls of your `async def` function that wait at the same time in one worker")
    env: tuple[str, ...] = key((), "environment variables that your function gets", strict=False, resume="free")
    network: bool = key(False, "let your function open network connections", resume="free")
    files: tuple[FilePath, ...] = key(
        (), "what else than its code your function may read and write", strict=False, resume="free"
    )

    @property
    def is_user_function(self) -> bool:
        return ":" in self.name

    @property
    def is_verifier(self) -> bool:
        return self.name in VERIFIERS

    @property
    def is_judged_outside(self) -> bool:
        """True if the response is not to blame for a failure. It is then unscorable, and counted."""
        return self.is_user_function or self.name == "rubric"

    @property
    def needs_answer(self) -> bool:
        """True if it compares with a gold answer. A user function gets an empty text if there is none."""
        return not self.is_user_function and self.name not in WITHOUT_ANSWER


class RewardConfig(Section):
    """The rewards that are summed, and the limits of the processes that compute them."""

    parts: tuple[RewardPart, ...] = key(
        (RewardPart(name="math"),),
        "rewards whose weighted sum is the reward of a response; []: reward_model, environment or teacher alone",
        json_schema_extra={"default": [{"name": "math"}]},
    )
    by_source: dict[str, tuple[RewardPart, ...]] = key({}, "other parts for the prompts of the named data sources")
    workers: PositiveInt | None = key(None, "grading processes per node; null: the cores, at most 8", resume="free")
    cpu_seconds: PositiveFloat = key(2.0, "CPU seconds that one part may take for one response", resume="free")
    wall_seconds: PositiveFloat = key(10.0, "seconds by the clock, without waiting for a core", resume="free")
    memory_mb: int = key(1024, "memory that a grading process may add, MiB", ge=64, resume="free")
    bound: float = key(1e4, "largest absolute value of a reward; a larger one is a failure", gt=0, le=FLOAT32_MAX)
    bad_gold: Literal["fail", "skip"] = key("fail", "if a gold answer cannot be graded: stop, or leave its row out")
    failure_fraction: Fraction = key(0.02, "share of calls of a function or rubric that may fail", resume="free")
    failures_always_allowed: NonNegativeInt = key(10, "failures that never stop the run", resume="free")

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            value = {"parts": value}
        if not isinstance(value, dict):
            return value
        by_source = value.get("by_source", {})
        if not isinstance(by_source, dict):
            raise ValueError(f"reward.by_source={by_source!r}: not a mapping. Write {{source: [{{name: gsm8k}}]}}.")
        read = {"by_source": {name: _parts(parts, f"reward.by_source.{name}") for name, parts in by_source.items()}}
        return value | read | ({"parts": _parts(value["parts"], "reward.parts")} if "parts" in value else {})

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        names: dict[str, str] = {}
        for part in self.all_parts:
            if (other := names.setdefault(logged_name(part.name), part.name)) != part.name:
                reason = f"would both be logged as {logged_name(part.name)}"
                remedy = "Write one as a relative path, or rename its file."
                raise ValueError(f"reward: {other} and {part.name} {reason}. {remedy}")
        for parts in (self.parts, *self.by_source.values()):
            most = sum(abs(part.weight) for part in parts if not part.is_user_function)
            if most > self.bound:
                reason = f"the weights of built-in rewards add up to {most:g}. Lower them, or raise the bound."
                raise ValueError(f"reward.bound={self.bound:g}: {reason}")
        for options in (CodeOptions(**part.options) for part in self.all_parts if part.name == "code"):
            if (seconds := WALL_PER_CPU * options.cpu_seconds) >= self.wall_seconds:
                raise ValueError(
                    f"reward code: cpu_seconds={options.cpu_seconds:g} allows {seconds:g} s by the clock, but reward."
                    f"wall_seconds={self.wall_seconds:g} ends the tests earlier. Raise reward.wall_seconds."
                )
        return self

    def parts_of(self, source: str) -> tuple[RewardPart, ...]:
        return self.by_source.get(source, self.parts)

    @property
    def leaves_something_ungraded(self) -> bool:
        """True if a source has no parts. Then only a reward model or environment can grade its responses."""
        return not all((self.parts, *self.by_source.values()))

    @property
    def parts_of_every_source(self) -> tuple[str, ...]:
        """Names of the parts by which every response is graded, whatever its source."""
        kinds = [[part.name for part in parts] for parts in (self.parts, *self.by_source.values())]
        return tuple(name for name in kinds[0] if all(name in names for names in kinds))

    @property
    def all_parts(self) -> tuple[RewardPart, ...]:
        return self.parts + tuple(part for parts in self.by_source.values() for part in parts)


def may_be_accuracy(metric: str) -> bool:
    """True if values of this part from 0 to 1 may be called accuracy."""
    return metric not in NOT_AN_ACCURACY


def _parts(value: Any, key: str) -> tuple[RewardPart, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key}={value!r}: not a list of rewards. Write [{{name: math, weight: 1.0}}].")
    parts = tuple(_part(item, f"{key}.{index}") for index, item in enumerate(value))
    names = [part.name for part in parts]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"{key}.{index}.name={name!r}: named twice, and parts are logged by name. Keep one.")
    return parts


def _part(value: Any, key: str) -> RewardPart:
    """Read one entry of the list. Keys other than name and weight are options of the reward."""
    if isinstance(value, RewardPart):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"{key}={value!r}: a reward needs a name. Write {{name: math, weight: 1.0}}.")
    name, weight, options = value["name"], value.get("weight", 1.0), value.get("options", {})
    is_built_in = name in OPTIONS_OF_REWARD
    fields = {
        field: value[field]
        for field in USER_FIELDS  # of a user function; a dumped config has the defaults for all
        if field in value and not (is_built_in and value[field] not in (RewardPart.model_fields[field].default, []))
    }
    if isinstance(options, dict):
        options = {**options, **{k: v for k, v in value.items() if k not in ("name", "weight", "options", *fields)}}
    part = validated(RewardPart, {"name": name, "weight": weight, "options": options, **fields}, section=key)
    if is_built_in:
        known = ("name", "weight", *OPTIONS_OF_REWARD[name].model_fields)
        for option, given in options.items() if isinstance(options, dict) else ():
            if option not in known:
                unknown = f"there is no such key. {suggest(option, known, f'{key}.')}"
                why = "only a function of yours reads it. Remove it." if option in USER_FIELDS else unknown
                raise ValueError(f"{key}.{option}={short_value(given)}: {why}")
        validated(OPTIONS_OF_REWARD[name], options, section=key)
    elif not USER_CODE.fullmatch(name):
        form = "not of the form package.module:function or path/to/file.py:function"
        reason = form if ":" in name else "there is no such reward"
        raise ValueError(f"{key}.name={name!r}: {reason}. {suggest(name, OPTIONS_OF_REWARD)}")
    return part
