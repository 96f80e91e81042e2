"""The `environment` section and the list `tools`: what a model may act on, and the limits of the processes it runs in.

Three spellings of an environment mean the same; the last one has several, chosen by the column `environment` of a row:

    environment: my.module:Class
    environment: {name: my.module:Class, options: {level: 3}}
    environment: {name: my.module:play}                         a coroutine that gets `generate`
    environment: {name: program, command: [python, agent.py]}   a program that speaks to the model over HTTP
    environment: {by_name: {chess: my.module:Chess, sums: {name: calculator}}}
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from rlhf.config.base import USER_CODE, FilePath, Fraction, Section, key, suggest

PROGRAM = "program"
TOOLS = ("calculator", "python")
BUILT_IN = (*TOOLS, PROGRAM)


COMMAND = "of name: program: what is started for each rollout, such as [venv/bin/python, agent.py]"
TIMEOUT = "of name: program: seconds that it may take for its rollout by the clock; null: 600"


class EnvironmentPart(Section):
    """One environment: its class, coroutine or built-in tool, and the arguments with which it is made."""

    name: FilePath = Field(
        description="your.module:Class, your.module:coroutine, a/file.py:Class, calculator, python or program"
    )
    options: dict[str, Any] = key({}, "keyword arguments of the class")
    command: tuple[str, ...] = key((), COMMAND, strict=False)
    timeout_s: PositiveFloat | None = key(None, TIMEOUT)

    @field_validator("name")
    @classmethod
    def _names_something(cls, value: str) -> str:
        return checked_name(value, "environment.name")

    @model_validator(mode="after")
    def _has_a_command(self) -> Self:
        if (self.name == PROGRAM) != bool(self.command):
            missing = "a command" if self.name == PROGRAM else f"name: {PROGRAM}"
            raise ValueError(
                f"environment.name={self.name} with command={list(self.command)}: {missing} is missing. Write {{name: "
                "program, command: [python, agent.py]}."
            )
        if self.timeout_s is not None and self.name != PROGRAM:
            raise ValueError(
                f"environment.timeout_s={self.timeout_s:g} with name={self.name}: it is for a program alone. "
                "Remove it, or write {name: program, command: [...]}."
            )
        if self.name == PROGRAM and self.options:
            raise ValueError(f"environment.options={self.options} of a program: it takes none. Put them into command.")
        return self


class EnvironmentConfig(Section):
    """What the model acts on in a rollout, and what its processes may use and reach."""

    name: FilePath | None = key(
        None, f"your.module:Class, your.module:coroutine, a/file.py:Class, or {' or '.join(BUILT_IN)}; null: none"
    )
    options: dict[str, Any] = key({}, "keyword arguments of the class")
    command: tuple[str, ...] = key((), COMMAND, strict=False)
    timeout_s: PositiveFloat | None = key(None, TIMEOUT)
    by_name: dict[str, EnvironmentPart] = key({}, "several environments; the row's column `environment` names its own")
    weight: float = key(1.0, "factor of the environment's own reward in the sum")
    processes: PositiveInt = key(64, "processes for environments on each node; a rollout waits until one is free")
    python: FilePath | None = key(None, "interpreter that runs them, such as venv/bin/python; null: that of the run")
    env: tuple[str, ...] = key((), "environment variables that they get", strict=False)
    network: bool = key(False, "let them open network connections")
    files: tuple[FilePath, ...] = key((), "what else than their code they may read and write", strict=False)
    cpu_seconds: PositiveFloat = key(30.0, "CPU seconds that one call may take")
    wall_seconds: PositiveFloat = key(120.0, "seconds that one call may take by the clock")
    memory_mb: int = key(1024, "memory that a process may add to what it starts with, MiB", ge=64)
    failed_reward: float = key(0.0, "reward of a rollout whose tool call went over a limit; it is trained on")
    max_failed_fraction: Fraction = key(0.5, "share of a step's rollouts that may fail before the run ends")

    accept_changed_code: bool = key(False, "--resume accepts environments whose code is not what the run began with")

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, str):
            return {"name": value}
        by_name = value.get("by_name") if isinstance(value, dict) else None
        if isinstance(by_name, dict):
            parts = {name: {"name": part} if isinstance(part, str) else part for name, part in by_name.items()}
            return {**value, "by_name": parts}
        return value

    @field_validator("name")
    @classmethod
    def _names_something(cls, value: str | None) -> str | None:
        return None if value is None else checked_name(value, "environment.name")

    @model_validator(mode="after")
    def _one_way_of_naming(self) -> Self:
        if self.name is not None and self.by_name:
            raise ValueError(
                f"environment.name={self.name} with environment.by_name: each row would have two environments. Keep "
                "one of the keys."
            )
        if self.options and self.name is None:
            raise ValueError(
                f"environment.options={self.options} without environment.name: nothing would get them. Name the class."
            )
        if self.command and self.name is None:
            raise ValueError(f"environment.command={list(self.command)} without environment.name. Set it to program.")
        if self.timeout_s is not None and self.name is None:
            raise ValueError(
                f"environment.timeout_s={self.timeout_s:g} without environment.name: nothing reads it. Set it next to "
                "the command of a program."
            )
        _ = self.parts  # checks them
        return self

    @property
    def parts(self) -> dict[str, EnvironmentPart]:
        """All environments by the value of the column that chooses them; "" where there is one for all rows."""
        if self.name is not None:
            only = EnvironmentPart(name=self.name, options=self.options, command=self.command, timeout_s=self.timeout_s)
            return {"": only}
        return self.by_name

    @property
    def has_programs(self) -> bool:
        return any(part.name == PROGRAM for part in self.parts.values())


def checked_name(name: str, key: str, built_in: tuple[str, ...] = BUILT_IN) -> str:
    """The name of a class, coroutine, function or built-in tool; ValueError if it has another form."""
    if name in built_in or USER_CODE.fullmatch(name):
        return name
    form = "not of the form package.module:name or path/to/file.py:name"
    reason = form if ":" in name else "there is no such environment or tool"
    raise ValueError(f"{key}={name!r}: {reason}. {suggest(name, built_in)}")


def tool_names(value: Any) -> tuple[str, ...]:
    """The list `tools` of the config; ValueError if it is no list of names, or names a tool twice."""
    names = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"tools={value!r}: not a list of names. Write [your.module:function, calculator].")
    for index, name in enumerate(names):
        checked_name(name, f"tools.{index}", TOOLS)
        if name in names[:index]:
            raise ValueError(f"tools.{index}={name!r}: named twice. Keep one.")
    return tuple(names)
