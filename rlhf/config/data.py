"""The `data` section: which rows become prompts, how they are rendered, and which of their columns is the answer.

`data.train` and `data.eval` take a string, a mapping, or a list of either; all three become a tuple of `SourceConfig`.
So `data.train=some/train.jsonl` on a command line replaces the value in the file, and uses the columns that the section
sets for all sources.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import PurePath
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rlhf.config.base import FilePath, Section

TemplateName = Literal["model", "chatml", "qwen-math", "tulu", "qa", "raw"]
AnswerFormat = Literal["auto", "gsm8k", "boxed", "text", "none"]

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
OTHER_SUFFIXES = (".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".zip")  # files that are not read, and not hub names
USUAL_COLUMNS = {
    "prompt_column": ("question", "problem", "prompt", "messages", "instruction", "query"),
    "answer_column": ("answer", "ground_truth", "final_answer", "expected_answer", "solution"),
}
OPENS_THOUGHT = re.compile(  # at the end of a rendered prompt: the response begins inside a thought
    r"(?:<(?:seed:)?think(?:ing)?>|\[THINK\]|◁think▷|<\|channel\|>analysis<\|message\|>)\s*\Z"
)


class DatasetConfig(Section):
    """One data set: a local file or folder, or a data set of the hub."""

    path: FilePath = Field(
        min_length=1,
        description="local .jsonl, .json or .parquet file, local folder, or hub name such as openai/gsm8k",
    )
    name: str | None = Field(None, description="configuration of a hub data set, e.g. main; local files have none")
    split: str | None = Field(
        None, description="split of a hub data set or folder; null: train for data.train, test for data.eval"
    )


class SourceConfig(DatasetConfig):
    """One data set of prompts."""

    source: str | None = Field(
        None,
        min_length=1,
        pattern=r"^[^/\s]+$",
        description="label in prompt ids, metrics and rewards; null: the file's stem or the hub name's last part",
    )
    weight: float | None = Field(
        None,
        gt=0,
        description="relative share of an epoch, drawn anew each epoch; the scarcest source is used up",
    )
    rows: int | None = Field(
        None, ge=1, description="rows per epoch, drawn anew each epoch (data.eval: the first rows); null: all"
    )
    prompt_column: str | None = Field(None, description="this source's own data.prompt_column; null: the section's")
    answer_column: str | None = Field(None, description="this source's own data.answer_column; null: the section's")
    answer_format: AnswerFormat | None = Field(
        None, description="this source's own data.answer_format; null: the section's"
    )

    samples_per_prompt: int | None = Field(
        None, ge=1, description="data.eval: this set's own evaluation.samples_per_prompt; null: the section's"
    )
    temperature: float | None = Field(
        None, ge=0, description="data.eval: this set's own evaluation.temperature; null: the section's"
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="data.eval: this set's own evaluation.top_p; null: the section's"
    )
    max_response_tokens: int | None = Field(
        None, ge=1, description="data.eval: this set's own evaluation.max_response_tokens; null: the section's"
    )

    @property
    def sampling(self) -> dict[str, float]:
        """The keys of `evaluation` that this evaluation set replaces with its own."""
        given = self.model_dump(include={"samples_per_prompt", "temperature", "top_p", "max_response_tokens"})
        return {name: value for name, value in given.items() if value is not None}

    @model_validator(mode="after")
    def _one_way_of_mixing(self) -> SourceConfig:
        if self.weight is not None and self.rows is not None:
            raise ValueError(
                f"weight={self.weight:g} and rows={self.rows} of {self.path} contradict each other: "
                "both set its share of an epoch. Keep one."
            )
        return self

    @property
    def label(self) -> str:
        """The value of `Prompt.source`."""
        path = PurePath(self.path)
        return self.source or (path.stem if path.suffix in FILE_SUFFIXES else path.name)


S = TypeVar("S", bound=DatasetConfig)


class DatasetsConfig(Section, Generic[S]):
    """The data sets of any program that trains."""

    train: tuple[S, ...] = Field(
        description="training data: a path or hub name, a mapping with `path`, or a list of either"
    )
    eval: tuple[S, ...] = Field((), description="held-out data: as data.train; null: none")

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _as_sources(cls, value: Any, info: ValidationInfo) -> Any:
        """Read a string, a mapping, or a list of either, as a tuple of mappings."""
        if value is None:
            return ()
        entries = value if isinstance(value, list | tuple) else (value,)
        for index, entry in enumerate(entries):
            key = f"data.{info.field_name}" if len(entries) == 1 else f"data.{info.field_name}.{index}"
            if not isinstance(entry, str | dict | DatasetConfig):
                raise ValueError(
                    f"{key}: {entry!r} names no data. "
                    "Use a path or hub name, a mapping with `path`, or a list of either."
                )
        return tuple({"path": entry} if isinstance(entry, str) else entry for entry in entries)

    @model_validator(mode="after")
    def _something_to_train_on(self) -> Self:
        if not self.train:
            raise ValueError("data.train is empty: there is nothing to train on. Name a file or a hub data set.")
        return self


class DataConfig(DatasetsConfig[SourceConfig]):
    """Prompts for training and evaluation; each set of `eval` is reported by itself."""

    prompt_column: str | None = Field(
        None,
        description="column of the prompt, text or role/content messages, a.b for nested ones; "
        f"null: the first that exists of {', '.join(USUAL_COLUMNS['prompt_column'])}",
    )
    answer_column: str | None = Field(
        None,
        description="column of the answer, a.b for nested ones; "
        f"null: the first that exists of {', '.join(USUAL_COLUMNS['answer_column'])}",
    )
    answer_format: AnswerFormat = Field(
        "auto",
        description="where the answer is in its column: gsm8k (after the last ####), boxed (last \\boxed{}), "
        "text (all of it), auto (the first of these that fits), none (the data has no answers)",
    )
    template: TemplateName = Field(
        "model",
        description="model (the tokenizer's chat template), chatml, qwen-math, tulu, qa (Question:/Answer:), raw",
    )
    system_prompt: str | None = Field(
        None, min_length=1, description="system message for prompts that have none; null: none"
    )
    prompt_suffix: str | None = Field(
        None, min_length=1, description="text added to the prompt on a line of its own; null: none"
    )
    max_prompt_tokens: int = Field(
        1024, ge=1, description="longest prompt, template included, tokens; longer prompts are left out and counted"
    )
    on_bad_row: Literal["fail", "skip"] = Field(
        "fail", description="a row that cannot be used ends the program before it starts, or is left out and counted"
    )
    eval_rows: int | None = Field(None, ge=1, description="first rows of each evaluation set to use; null: all")

    @model_validator(mode="after")
    def _consistent_sources(self) -> DataConfig:
        for key, sources in (("data.train", self.train), ("data.eval", self.eval)):
            label, count = next(iter(Counter(source.label for source in sources).most_common(1)), ("", 0))
            if count > 1:
                raise ValueError(
                    f"{key}: {count} sources are labelled {label!r}, so their prompts would have the same ids. "
                    "Give each its own `source`."
                )
        unweighted = [source.path for source in self.train if source.weight is None]
        if unweighted and len(unweighted) < len(self.train):
            raise ValueError(
                f"data.train: {unweighted[0]} has no weight while other sources have one, so its share is not defined. "
                "Give every source a weight, or none."
            )
        for source in self.train:
            for name, value in source.sampling.items():
                remedy = "Remove it" if name == "top_p" else f"Remove it, or set rollout.{name}"  # training has none
                raise ValueError(
                    f"data.train: {source.path} has {name}={value:g}, which is for evaluation sets. {remedy}."
                )
        for source in self.eval:
            if source.weight is not None:
                raise ValueError(
                    f"data.eval: {source.path} has weight={source.weight:g}, but evaluation sets are not mixed. "
                    "Remove it, or use rows."
                )
        return self
