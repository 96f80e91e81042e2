"""The `data` section: which rows become prompts, how they are rendered, and which of their columns is the answer.

`data.train` and `data.eval` take a string, a mapping, or a list of either; all three become a tuple of `SourceConfig`.
So `data.train=some/train.jsonl` on a command line replaces the value in the file, and uses the columns that the section
sets for all sources.
"""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import PurePath
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator

from rlhf.config.base import REQUIRED, FilePath, Fraction, NonNegative, Section, key, with_home

NamedTemplate = Literal["model", "chatml", "qwen-math", "tulu", "qa", "raw"]
TEMPLATE_SUFFIX = ".jinja"
AnswerFormat = Literal["auto", "gsm8k", "boxed", "text", "none"]

ENVIRONMENT = "environment"  # as a path: the environment makes the prompts
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
OTHER_SUFFIXES = (".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".zip")  # files that are not read, and not hub names
USUAL_COLUMNS = {
    "prompt_column": ("question", "problem", "prompt", "messages", "instruction", "query"),
    "answer_column": (
        "answer", "ground_truth", "final_answer", "expected_answer", "solution",
        "reward_model.ground_truth.target", "reward_model.ground_truth",
    ),
}  # fmt: skip


def is_template_file(template: str) -> bool:
    """True if data.template is the path of a template, and not a name."""
    return template.endswith(TEMPLATE_SUFFIX)


def _known_template(template: str) -> str:
    if is_template_file(template):
        return with_home(template)
    if template not in get_args(NamedTemplate):
        file = f"the path of a file that ends with {TEMPLATE_SUFFIX}"
        raise ValueError(f"{template!r} is no template. Use {', '.join(get_args(NamedTemplate))}, or {file}.")
    return template


TemplateName = Annotated[str, AfterValidator(_known_template)]
TEMPLATE_CHOICES = "chat template: model (its own), chatml, qwen-math, tulu, a .jinja file; or plain text: qa, raw"
PLAIN = ("raw", "qa")  # templates without turns


# of apply_chat_template, of data.date (strftime_now), and of functions in data/templates.py (keep_assistant)
OUR_ARGUMENTS = {
    "messages", "conversation", "tools", "add_generation_prompt", "chat_template", "tokenize", "truncation",
    "max_length", "tokenizer_kwargs", "continue_final_message", "return_dict", "return_tensors",
    "return_assistant_tokens_mask", "padding", "strftime_now", "keep_assistant",
}  # fmt: skip


def _no_argument_of_ours(arguments: dict[str, Any]) -> dict[str, Any]:
    if ours := sorted(OUR_ARGUMENTS & arguments.keys()):
        raise ValueError(f"{', '.join(ours)}: rlhf passes it itself. Remove it.")
    return arguments


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_no_argument_of_ours)]


class DatasetConfig(Section):
    """One data set: a local file or folder, or a data set of the hub."""

    path: FilePath = Field(
        min_length=1, description="local .jsonl, .json or .parquet, a folder, or a hub name such as openai/gsm8k"
    )
    name: str | None = key(None, "configuration of a hub data set, e.g. main; local files have none")
    split: str | None = key(None, "of a hub data set or folder; null: train for data.train, test for data.eval")


class SourceConfig(DatasetConfig):
    """One data set of prompts."""

    source: str | None = key(None, "label in ids and metrics; null: stem or end of the path", pattern=r"^[^/\s]+$")
    weight: PositiveFloat | None = key(None, "relative share of an epoch, drawn anew for each; the scarcest is used up")
    rows: PositiveInt | None = key(None, "drawn anew for each epoch (data.eval: the first ones); null: all")
    prompt_column: str | None = key(None, "its own data.prompt_column; null: the section's")
    answer_column: str | None = key(None, "its own data.answer_column; null: the section's")
    answer_format: AnswerFormat | None = key(None, "its own data.answer_format; null: the section's")
    samples_per_prompt: PositiveInt | None = key(None, "data.eval: its own; null: evaluation.samples_per_prompt")
    temperature: NonNegative | None = key(None, "data.eval: its own; null: evaluation.temperature")
    top_p: float | None = key(None, "data.eval: its own; null: evaluation.top_p", gt=0, le=1)
    top_k: PositiveInt | None = key(None, "data.eval: its own; null: evaluation.top_k")
    min_p: float | None = key(None, "data.eval: its own; null: evaluation.min_p", ge=0, lt=1)
    max_response_tokens: PositiveInt | None = key(None, "data.eval: its own; null: evaluation.max_response_tokens")
    metric: FilePath | None = key(None, "its own (data.train: for the curriculum); null: evaluation.metric")

    @property
    def is_environment(self) -> bool:
        """True if the environment makes the prompts, and no file holds them."""
        return self.path == ENVIRONMENT

    @property
    def sampling(self) -> dict[str, float]:
        """The keys of `evaluation` for sampling that this evaluation set replaces with its own."""
        names = {"samples_per_prompt", "temperature", "top_p", "top_k", "min_p", "max_response_tokens"}
        return self.model_dump(include=names, exclude_none=True)

    @model_validator(mode="after")
    def _one_way_of_mixing(self) -> Self:
        if self.weight is not None and self.rows is not None:
            reason = "both set its share of an epoch. Keep one."
            raise ValueError(f"weight={self.weight:g} and rows={self.rows} of {self.path}: {reason}")
        return self

    @property
    def label(self) -> str:
        """The name of this source in ids and metrics: `Prompt.source`."""
        path = PurePath(self.path)
        return self.source or (path.stem if path.suffix in FILE_SUFFIXES else path.name)


S = TypeVar("S", bound=DatasetConfig)


class DatasetsConfig(Section, Generic[S]):
    """The data sets of any program that trains."""

    train: tuple[S, ...] = key(REQUIRED, "a path or hub name, a mapping with `path`, or a list of them", resume="free")
    eval: tuple[S, ...] = key((), "held-out data: as data.train; null: none", resume="free")
    on_bad_row: Literal["fail", "skip"] = key("fail", "a row that cannot be used ends the program, or is left out")
    date: datetime.date | None = key(None, "YYYY-MM-DD, for a chat template that writes the day; null: first start")

    @property
    def clock(self) -> dict[str, Any]:
        """The argument with which a chat template writes `date` as the day. Empty: it writes today."""
        midnight = None if self.date is None else datetime.datetime.combine(self.date, datetime.time())
        return {} if midnight is None else {"strftime_now": midnight.strftime}

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _as_sources(cls, value: Any, info: ValidationInfo) -> Any:
        """Read a string, a mapping, or a list of either, as a tuple of mappings."""
        entries = value if isinstance(value, list | tuple) else () if value is None else (value,)
        if not entries and info.field_name == "train":
            raise ValueError("data.train is empty: there is nothing to train on. Name a file or a hub data set.")
        for index, entry in enumerate(entries):
            if not isinstance(entry, str | dict | DatasetConfig):
                name = f"data.{info.field_name}" if len(entries) == 1 else f"data.{info.field_name}.{index}"
                remedy = "Use a path or hub name, a mapping with `path`, or a list of either."
                raise ValueError(f"{name}: {entry!r} names no data. {remedy}")
        return tuple({"path": entry} if isinstance(entry, str) else entry for entry in entries)


class CurriculumConfig(Section):
    """Which prompts are drawn less; the pass rate of a prompt is that of its last group."""

    min_pass_rate: Fraction = key(0.0, "prompts whose last group has at most this share of right answers come less")
    max_pass_rate: Fraction = key(1.0, "prompts whose last group has at least this share come less")
    warmup_epochs: NonNegative = key(1.0, "first passes over the data in which all prompts come alike")

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min_pass_rate >= self.max_pass_rate:
            given = f"data.curriculum.min_pass_rate={self.min_pass_rate:g} with max_pass_rate={self.max_pass_rate:g}"
            raise ValueError(f"{given}: no prompt is between them. Lower the former, or raise the latter.")
        return self


class DataConfig(DatasetsConfig[SourceConfig]):
    """Prompts for training and evaluation; each set of `eval` is reported by itself."""

    prompt_column: str | None = key(
        None, f"of texts or messages, a.b if nested; null: the first of {', '.join(USUAL_COLUMNS['prompt_column'])}"
    )
    answer_column: str | None = key(
        None, f"of answers, a.b if nested; null: the first of {', '.join(USUAL_COLUMNS['answer_column'])}"
    )
    answer_format: AnswerFormat = key(
        "auto", "where in its column: the first that fits, after the last ####, in the last box, all of it, or nowhere"
    )
    template: TemplateName = key("model", TEMPLATE_CHOICES)
    chat_template_kwargs: TemplateArguments = key({}, "what the chat template is given, {enable_thinking: false}")
    system_prompt: str | None = key(None, "system message for prompts that have none; null: none", min_length=1)
    prompt_suffix: str | None = key(None, "text added to the prompt on a line of its own; null: none", min_length=1)
    max_prompt_tokens: PositiveInt = key(1024, "longest prompt with its template, tokens; longer ones are left out")
    eval_rows: PositiveInt | None = key(None, "first rows of each evaluation set to use; null: all", resume="free")
    curriculum: CurriculumConfig | None = key(
        None, "draw prompts less, the further their pass rate is from a half; null: all alike"
    )

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The arguments of the chat template besides the conversation."""
        return {**self.chat_template_kwargs, **self.clock}

    @model_validator(mode="after")
    def _consistent_sources(self) -> Self:
        for name, sources in (("data.train", self.train), ("data.eval", self.eval)):
            for label, count in Counter(source.label for source in sources).items():
                if count > 1:
                    reason = "so their prompts would have the same ids. Give each its own `source`."
                    raise ValueError(f"{name}: {count} sources are labelled {label!r}, {reason}")
        unweighted = [source.path for source in self.train if source.weight is None]
        if unweighted and len(unweighted) < len(self.train):
            reason = "while other sources have one. Give every source a weight, or none."
            raise ValueError(f"data.train: {unweighted[0]} has no weight, {reason}")
        for source in self.train:
            for name, value in source.sampling.items():
                reason = f"only evaluation sets have it. Remove it, or set rollout.{name}."
                raise ValueError(f"data.train: {source.path} has {name}={value:g}: {reason}")
            if source.metric is not None and self.curriculum is None:
                reason = "it has no effect without data.curriculum. Remove it, or set it in data.eval."
                raise ValueError(f"data.train: {source.path} has metric={source.metric}: {reason}")
        for source in self.eval:
            if source.weight is not None:
                reason = "evaluation sets are not mixed. Remove it, or use rows."
                raise ValueError(f"data.eval: {source.path} has weight={source.weight:g}: {reason}")
        return self
