"""The `reward` section: which rewards grade a response, by data source, and limits of the processes that run them.

Two spellings mean the same. A list names the parts; a mapping adds settings and other parts for some sources:

    reward: [{name: math, weight: 1.0}, {name: format, weight: 0.1, style: think}]
    reward: {parts: [{name: math}], by_source: {gsm8k: [{name: gsm8k}]}, workers: 16}

Keys of a part other than `name` and `weight` are options of that reward.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf.config.base import FilePath, Section, suggest
from rlhf.config.load import validated

ExtractionStep = Literal["box", "answer_tag", "hash", "answer_is", "math_span", "last_number"]

STEPS_OF_MODE: dict[str, tuple[ExtractionStep, ...]] = {
    "strict": ("box",),
    "lenient": ("box", "answer_tag", "hash", "answer_is", "math_span", "last_number"),
}


class Tolerance(Section):
    """How far a number may be from the gold answer; a number that rounds to a gold decimal is always near enough."""

    relative: float = Field(0.0, ge=0, lt=1, description="share of the gold answer")
    absolute: float = Field(0.0, ge=0, description="in the unit of the gold answer")


class MathOptions(Section):
    """A math answer, found in the response and compared with the gold answer."""

    mode: Literal["strict", "lenient"] = Field(
        "strict", description="strict takes a boxed answer only, lenient any stated answer"
    )
    extract: tuple[ExtractionStep, ...] | None = Field(
        None, strict=False, description="places to look for an answer, in order; null: those of the mode"
    )
    tolerance: Tolerance | None = Field(
        None, description="{relative, absolute}: count a number that is near enough as right; null: only equal numbers"
    )
    evaluated: bool | None = Field(
        None,
        description="whether an answer must be worked out: 7, not 3+4; null: in strict mode",
    )

    decimal_comma: bool = Field(
        False, description="read 3,5 and 1.234 in an answer as 3.5 and 1234, as many languages write numbers"
    )

    @property
    def steps(self) -> tuple[ExtractionStep, ...]:
        return self.extract if self.extract is not None else STEPS_OF_MODE[self.mode]

    @property
    def must_be_evaluated(self) -> bool:
        return self.evaluated if self.evaluated is not None else self.mode == "strict"


class Gsm8kOptions(Section):
    """The number after the last `####`."""


class MultipleChoiceOptions(Section):
    """The letter of the chosen option."""

    letters: str = Field("ABCDEFGHIJ", min_length=2, description="the letters that name options")


class ExactOptions(Section):
    """The whole answer as a string."""

    ignore_case: bool = Field(True, description="upper and lower case count as equal")


class F1Options(Section):
    """Overlap of the words of answer and gold."""

    threshold: float | None = Field(None, gt=0, le=1, description="give 1 at this F1 or above, else 0; null: F1 itself")


class FormatOptions(Section):
    """The form of the response, whatever it answers."""

    style: Literal["think", "think_answer", "boxed"] = Field(
        "think_answer",
        description="<think>..</think> first; also <answer>..</answer> last; exactly one box",
    )
    pattern: str | None = Field(None, description="regular expression for the whole response, in place of a style")

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

    min_tokens: int = Field(0, ge=0, description="shortest response without a penalty, tokens")
    max_tokens: int | None = Field(None, ge=1, description="longest response allowed, tokens; null: no upper bound")
    buffer_tokens: int = Field(0, ge=0, description="tokens before a bound over which the penalty grows")

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.max_tokens is not None and self.min_tokens + self.buffer_tokens > self.max_tokens:
            raise ValueError("min_tokens + buffer_tokens exceed max_tokens, so every length has a penalty. Lower them.")
        return self


class RepetitionOptions(Section):
    """A penalty: the share of word n-grams that occurred before."""

    ngram: int = Field(8, ge=1, description="words in an n-gram")
    free_fraction: float = Field(0.1, ge=0, lt=1, description="share of repeated n-grams that costs nothing")


OPTIONS_OF_REWARD: dict[str, type[Section]] = {
    "math": MathOptions,
    "gsm8k": Gsm8kOptions,
    "multiple_choice": MultipleChoiceOptions,
    "exact": ExactOptions,
    "f1": F1Options,
    "format": FormatOptions,
    "length": LengthOptions,
    "repetition": RepetitionOptions,
}

WITHOUT_ANSWER = ("format", "length", "repetition")  # these ignore the gold answer
GRANTS = ("env", "network", "files")  # what a user function may reach
USER_FIELDS = ("group", "concurrency", *GRANTS)
USER_FUNCTION = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^:]+\.py):[A-Za-z_]\w*")


class RewardPart(Section):
    """One summand of the reward."""

    name: FilePath = Field(
        description=f"{', '.join(OPTIONS_OF_REWARD)}, your_package.your_module:your_function or a/file.py:your_function"
    )
    weight: float = Field(1.0, description="factor of this part in the sum")
    options: dict[str, Any] = Field({}, description="options of this reward")
    group: bool = Field(False, description="your function gets all responses to a prompt at once, and returns a list")
    concurrency: int = Field(
        128, ge=1, description="calls of your `async def` function that wait at the same time in one worker"
    )
    env: tuple[str, ...] = Field((), strict=False, description="environment variables that your function gets")
    network: bool = Field(False, description="let your function open network connections")
    files: tuple[FilePath, ...] = Field(
        (), strict=False, description="files and folders that your function may read and write, besides its code"
    )

    @property
    def is_user_function(self) -> bool:
        return ":" in self.name

    @property
    def needs_answer(self) -> bool:
        """Whether it compares with a gold answer; a user function gets "" where there is none."""
        return not self.is_user_function and self.name not in WITHOUT_ANSWER


class RewardConfig(Section):
    """The rewards that are summed, and the limits of the processes that compute them."""

    parts: tuple[RewardPart, ...] = Field(
        (RewardPart(name="math"),),
        json_schema_extra={"default": [{"name": "math"}]},  # in --help; the keys of a part have lines of their own
        description="rewards whose weighted sum is the reward of a response; []: reward_model alone gives the reward",
    )
    by_source: dict[str, tuple[RewardPart, ...]] = Field(
        {}, description="other parts for the prompts of the named data sources"
    )
    workers: int | None = Field(None, ge=1, description="grading processes; null: the cores, at most 8")
    spares: int = Field(1, ge=0, description="processes that are ready to replace a killed one")
    cpu_seconds: float = Field(2.0, gt=0, description="CPU seconds that one part may take for one response")
    wall_seconds: float = Field(
        10.0,
        gt=0,
        description="seconds that it may take by the clock, without the time spent waiting for a core",
    )
    memory_mb: int = Field(1024, ge=64, description="memory that a grading process may add to what it starts with, MiB")
    bad_gold: Literal["fail", "skip"] = Field(
        "fail", description="if the gold answer of a row cannot be graded: stop the run, or leave the row out"
    )
    failure_fraction: float = Field(
        0.02, ge=0, le=1, description="share of the calls of a user function that may fail before the run stops"
    )
    failures_always_allowed: int = Field(
        10, ge=0, description="failures of a user function that never stop the run, however few the calls"
    )

    accept_changed_code: bool = Field(
        False, description="let --resume continue with user functions whose code is not what the run began with"
    )

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            value = {"parts": value}
        if not isinstance(value, dict):
            return value
        normalized = dict(value)
        if "parts" in value:
            normalized["parts"] = _parts(value["parts"], "reward.parts")
        by_source = value.get("by_source", {})
        if not isinstance(by_source, dict):
            raise ValueError(f"reward.by_source={by_source!r}: not a mapping. Write {{source: [{{name: gsm8k}}]}}.")
        normalized["by_source"] = {
            source: _parts(parts, f"reward.by_source.{source}") for source, parts in by_source.items()
        }
        return normalized

    def parts_of(self, source: str) -> tuple[RewardPart, ...]:
        return self.by_source.get(source, self.parts)

    @property
    def leaves_something_ungraded(self) -> bool:
        """Whether a source has no parts, so that only a reward model can grade its responses."""
        return not all((self.parts, *self.by_source.values()))

    @property
    def parts_of_every_source(self) -> tuple[str, ...]:
        """Names of the parts by which every response is graded, whatever its source."""
        kinds = [[part.name for part in parts] for parts in (self.parts, *self.by_source.values())]
        return tuple(name for name in kinds[0] if all(name in names for names in kinds))

    @property
    def all_parts(self) -> tuple[RewardPart, ...]:
        return self.parts + tuple(part for parts in self.by_source.values() for part in parts)


def _parts(value: Any, key: str) -> tuple[RewardPart, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key}={value!r}: not a list of rewards. Write [{{name: math, weight: 1.0}}].")
    parts = tuple(_part(item, f"{key}.{index}") for index, item in enumerate(value))
    names = [part.name for part in parts]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(
                f"{key}.{index}.name={name!r}: named twice, and parts are logged by name. Keep one of the two."
            )
    return parts


def _part(value: Any, key: str) -> RewardPart:
    """One entry of the list; keys other than name and weight are options of the named reward."""
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
        validated(OPTIONS_OF_REWARD[name], options, section=key)
    elif not USER_FUNCTION.fullmatch(name):
        form = "not of the form package.module:function or path/to/file.py:function"
        reason = form if ":" in name else "there is no such reward"
        raise ValueError(f"{key}.name={name!r}: {reason}. {suggest(name, OPTIONS_OF_REWARD)}")
    return part
