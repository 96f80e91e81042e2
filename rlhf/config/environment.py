"""The `environment` section and the list `tools`: classes, programs and functions that a model may use, and limits.

The first two spellings mean the same; the last one has several, chosen by the column `environment` of a row:

    environment: my.module:Class
    environment: {name: my.module:Class, options: {level: 3}}
    environment: {name: my.module:play}                         a coroutine that gets `generate`
    environment: {name: program, command: [python, agent.py]}   a program that speaks to the model over HTTP
    environment: {name: service, url: "http://host:8000"}       a service that runs such agents
    environment: {name: reasoning_gym, dataset: leg_counting}   an environment of that package, see `ADAPTERS`
    environment: {by_name: {chess: my.module:Chess, sums: {name: calculator}}}
"""

from __future__ import annotations

import contextlib
import os
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rlhf.config.base import USER_CODE, FilePath, Fraction, Section, key, short_value, suggest
from rlhf.config.conditions import conflicts, unread_keys

PROGRAM, SERVICE = "program", "service"
VERIFIERS, OPENENV, REASONING_GYM = "verifiers", "openenv", "reasoning_gym"
TOOLS = ("calculator", "python")
LOOPBACK = "127.0.0.1"


class Adapter(NamedTuple):
    """How environments of another package become one of ours: its `keys` and `args` are the arguments of `code`."""

    code: str  # a class that plays, as a config of a user would name it
    keys: tuple[str, ...]  # of which a config has one


ADAPTERS = {
    VERIFIERS: Adapter("rlhf.environments.adapters.verifiers:Verifiers", ("id",)),
    OPENENV: Adapter("rlhf.environments.adapters.openenv:OpenEnv", ("url", "app")),
    REASONING_GYM: Adapter("rlhf.environments.adapters.reasoning_gym:ReasoningGym", ("dataset",)),
}
BUILT_IN = (*TOOLS, PROGRAM, SERVICE, *ADAPTERS)
EXAMPLES = {
    PROGRAM: "{name: program, command: [python, agent.py]}",
    SERVICE: '{name: service, url: "http://HOST:PORT"}',
    VERIFIERS: "{name: verifiers, id: NAME}",
    OPENENV: '{name: openenv, url: "http://127.0.0.1:8000"}',
    REASONING_GYM: "{name: reasoning_gym, dataset: leg_counting}",
}
OF_ENDPOINT = (PROGRAM, SERVICE)  # these speak to the model over HTTP
NEEDED = {PROGRAM: ("command",), SERVICE: ("url",)} | {name: adapter.keys for name, adapter in ADAPTERS.items()}
PART_READS_IF = {
    "command": "name=program",
    "returned_files": "name=program",
    "url": "name=service|openenv",
    "app": "name=openenv",
    "id": "name=verifiers",
    "dataset": "name=reasoning_gym",
    "args": f"name={'|'.join(ADAPTERS)}",
    "key_variable_name": "name=service",
    "timeout_s": "name=program|service",
}
READS_IF = PART_READS_IF | {"options": "name", "gives_answer": "name", "trained_sequences": "name or by_name"}
OF_PROCESSES = ("python", "env", "network", "files", "cpu_seconds", "wall_seconds", "memory_mb")  # of the run
KINDS = ("first", "parallel", "retried", "branched", "rewritten", "separate")  # of requests that begin a sequence
ALL = ("all",)
EnvironmentName = Annotated[FilePath, AfterValidator(lambda name: checked_name(name, "environment.name"))]
ToolNames = Annotated[tuple[str, ...], BeforeValidator(lambda value: tool_names(value))]
NAMES = f"your.module:Class, your.module:coroutine, a/file.py:Class, or {' or '.join(BUILT_IN)}"


class _Driven(Section):
    """The keys of one environment, except its name."""

    options: dict[str, Any] = key({}, "keyword arguments of the class")
    command: tuple[str, ...] = key((), "of name: program: its command, [venv/bin/python, agent.py]", strict=False)
    returned_files: tuple[str, ...] = key(
        (), "of name: program: patterns of files in its folder that rewards get, such as [answer.txt, 'src/*.py']",
        strict=False,
    )  # fmt: skip
    gives_answer: bool = key(False, "rows have their answers, even if the environment does not name their columns")
    url: str | None = key(
        None, "of name: service or openenv: the server's address", pattern="^https?://[^/]", resume="free"
    )
    app: FilePath | None = key(None, "of name: openenv: the application of its server, maze.server.app:app")
    id: str | None = key(None, "of name: verifiers: the environment, as the package names it", min_length=1)
    dataset: str | None = key(None, "of name: reasoning_gym: one of its data sets, leg_counting", min_length=1)
    args: dict[str, Any] = key({}, f"of name: {', '.join(ADAPTERS)}: arguments of the environment or data set")
    key_variable_name: str | None = key(None, "of name: service: variable with its key", resume="free")
    timeout_s: PositiveFloat | None = key(
        None, "of a program or service: seconds that a rollout may take by the clock; null: 600", resume="free"
    )


class EnvironmentPart(_Driven):
    """One environment: its class, coroutine or built-in tool, and the arguments with which it is made."""

    name: EnvironmentName = Field(description=NAMES)

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        for problem in unread_keys(self, PART_READS_IF, "environment."):
            raise ValueError(problem)
        needed = NEEDED.get(self.name, ())
        given = [key for key in needed if getattr(self, key)]
        if needed and not given:
            missing = f"{' or '.join(needed)} is missing"
            raise ValueError(f"environment.name={self.name}: {missing}. Write {EXAMPLES[self.name]}.")
        if len(given) > 1:
            raise ValueError(f"environment.{' with environment.'.join(given)}: each names it. Keep one of them.")
        if self.app is not None and not USER_CODE.fullmatch(self.app):
            form = "Write package.module:name or path/to/file.py:name."
            raise ValueError(f"environment.app={self.app}: not the name of an application. {form}")
        if needed and self.options:
            other = "args" if self.name in ADAPTERS else needed[0]
            raise ValueError(f"environment.options: {self.name} takes none. Put them into {other}.")
        if self.gives_answer and self.name == SERVICE:
            raise ValueError("environment.gives_answer=true: a service gets the whole row. Remove the key.")
        for pattern in self.returned_files:
            try:
                parts = pattern.split("/")
                inside = ".." not in parts and not [*Path(os.devnull).glob(pattern)] and pattern.isprintable()
                inside = inside and all(part == "**" or "**" not in part for part in parts)
            except (ValueError, IndexError, NotImplementedError):  # it is no pattern, or absolute
                inside = False
            if not inside:
                reason = "no pattern of files below the program's folder. Write such as answer.txt or src/*.py."
                raise ValueError(f"environment.returned_files: {pattern!r} is {reason}")
        try:
            address = urlsplit(self.url or "http://host")
            is_address = bool(address.hostname) and address.port != 0
        except ValueError:  # of the host, or the port
            is_address = False
        if not is_address:
            raise ValueError(f"environment.url: it names no host and port. Write such as {EXAMPLES[self.name]}.")
        if self.name == OPENENV and "@" in address.netloc:
            raise ValueError("environment.url: OpenEnv's servers take no password. Remove it.")
        if self.key_variable_name and "@" in address.netloc:
            reason = "both authorize the request. Keep one of them."
            raise ValueError(f"environment.key_variable_name with a password in environment.url: {reason}")
        return self

    @property
    def code(self) -> str:
        """The name of the class or coroutine that is run."""
        return ADAPTERS[self.name].code if self.name in ADAPTERS else self.name

    @property
    def adapted(self) -> str | None:
        """`module:name` of the code that an adapter loads: an application of OpenEnv, or a taskset of verifiers."""
        if self.id is None:
            return self.app
        return self.id.rpartition("/")[2].partition("@")[0].replace("-", "_").lower() + ":taskset"

    @property
    def reached_port(self) -> int:
        """The port of OpenEnv's server, if its address needs no look-up in the network; else 0."""
        address = urlsplit(self.url or "")
        with contextlib.suppress(ValueError):  # a name
            host = LOOPBACK if address.hostname == "localhost" else address.hostname
            if self.name == OPENENV and IPv4Address(host or ""):
                return address.port or (443 if address.scheme == "https" else 80)
        return 0

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the code."""
        if self.name not in ADAPTERS:
            return self.options
        return {key: getattr(self, key) for key in ADAPTERS[self.name].keys} | {"args": self.args}


class EnvironmentConfig(_Driven):
    """The environment of a rollout, and the limits and permissions of its processes."""

    name: EnvironmentName | None = key(None, f"{NAMES}; null: none")
    by_name: dict[str, EnvironmentPart] = key({}, "several environments; the row's column `environment` names its own")
    weight: float = key(1.0, "factor of the environment's own reward in the sum")
    processes: PositiveInt = key(
        64,
        "processes for environments on each node, rollouts at once of a service; others wait for a free one",
        resume="free",
    )
    python: FilePath | None = key(None, "interpreter that runs them, venv/bin/python; null: the run's", resume="free")
    env: tuple[str, ...] = key((), "environment variables that they get", strict=False, resume="free")
    network: bool = key(False, "let them open network connections", resume="free")
    files: tuple[FilePath, ...] = key((), "other files that they may read and write", strict=False, resume="free")
    endpoint_host: str = key(
        LOOPBACK,
        "IPv4 address of the driver's node at which a service on another machine reaches the model; other nodes of the "
        "run listen at their own address then",
        resume="free",
    )
    trained_sequences: tuple[str, ...] = key(
        ALL, f"of a coroutine, program or service: all, or a list: those that {', '.join(KINDS)} requests begin"
    )
    cpu_seconds: PositiveFloat = key(30.0, "CPU seconds that one call may take", resume="free")
    wall_seconds: PositiveFloat = key(120.0, "seconds that one call may take by the clock", resume="free")
    memory_mb: int = key(1024, "memory that a process may add to what it starts with, MiB", ge=64, resume="free")
    failed_reward: float = key(0.0, "reward of a rollout whose tool call went over a limit; it is trained on")
    max_failed_fraction: Fraction = key(0.5, "share of a step's rollouts that may fail", resume="free")

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

    @field_validator("trained_sequences", mode="before")
    @classmethod
    def _names_kinds(cls, value: Any) -> Any:
        kinds = ALL if value == "all" else tuple(value) if isinstance(value, list | tuple) else ()
        if kinds == ALL or (kinds and all(kind in KINDS for kind in kinds)):
            return kinds
        remedy = f"Use all, or some of [{', '.join(KINDS)}]: the requests that begin a sequence."
        raise ValueError(f"environment.trained_sequences={value!r}: unknown kinds. {remedy}")

    @field_validator("endpoint_host")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        with contextlib.suppress(ValueError):
            if not ((address := IPv4Address(value)).is_unspecified or address.is_multicast):
                return value
        remedy = f"Use {LOOPBACK}, or an address of the driver's node, as `hostname -I` prints it."
        raise ValueError(f"environment.endpoint_host={value!r}: not the address of one machine. {remedy}")

    @model_validator(mode="after")
    def _one_way_of_naming(self) -> Self:
        if self.name is not None and self.by_name:
            reason = "each row would have two environments. Keep one of the keys."
            raise ValueError(f"environment.name={self.name} with environment.by_name: {reason}")
        for value, part in self.by_name.items():
            if part.name in ADAPTERS:
                reason = "it makes the prompts itself, so no row chooses it. Write it as environment.name."
                raise ValueError(f"environment.by_name.{value}: {part.name}: {reason}")
        remedy = "this key has no effect here. Set it at an entry of environment.by_name."
        for problem in conflicts(self, {f"{of} and by_name": remedy for of in _Driven.model_fields}, "environment."):
            raise ValueError(problem)
        for problem in unread_keys(self, READS_IF if self.name is None else {}, "environment."):
            raise ValueError(problem)
        for field in OF_PROCESSES if self.only_services else ():
            if (value := getattr(self, field)) != type(self).model_fields[field].default:
                reason = "a service runs in processes of yours, which get nothing from the run. Remove the key."
                raise ValueError(f"environment.{field}={short_value(value)}: {reason}")
        for part in self.parts.values():
            if part.name == OPENENV and part.url and not (self.network or part.reached_port):
                reason = "its host is no IPv4 address, and environments may look up no name in the network"
                remedy = "Set environment.network=true, or write an IPv4 address."
                raise ValueError(f"environment.url={part.url}: {reason}. {remedy}")
        if self.endpoint_host != LOOPBACK and all(part.name != SERVICE for part in self.parts.values()):
            reason = "it is for a service on another machine. Everything else is on its node: remove the key."
            raise ValueError(f"environment.endpoint_host={self.endpoint_host}: {reason}")
        return self

    @property
    def parts(self) -> dict[str, EnvironmentPart]:
        """All environments by the value of the row's column `environment`. One for all rows has the key ""."""
        if self.name is None:
            return self.by_name
        return {"": EnvironmentPart(name=self.name, **{field: getattr(self, field) for field in _Driven.model_fields})}

    @property
    def reached_port(self) -> int:
        """The only port that environments may connect to, without `network`; 0: none."""
        return max((part.reached_port for part in self.parts.values()), default=0)

    @property
    def trained_kinds(self) -> tuple[str, ...]:
        """Kinds of requests whose sequences are trained."""
        return KINDS if self.trained_sequences == ALL else self.trained_sequences

    @property
    def only_services(self) -> bool:
        """True if no environment runs in processes of the run."""
        return bool(self.parts) and all(part.name == SERVICE for part in self.parts.values())

    @property
    def of_package(self) -> bool:
        """True if another package has the environment."""
        return self.name in ADAPTERS

    @property
    def uses_endpoint(self) -> bool:
        return any(part.name in OF_ENDPOINT for part in self.parts.values())


def checked_name(name: str, key: str, built_in: tuple[str, ...] = BUILT_IN) -> str:
    """The name of a class, coroutine, function or built-in tool. Raises ValueError if it has another form."""
    if name in built_in or USER_CODE.fullmatch(name):
        return name
    form = "not of the form package.module:name or path/to/file.py:name"
    reason = form if ":" in name else "there is no such environment or tool"
    raise ValueError(f"{key}={name!r}: {reason}. {suggest(name, built_in)}")


def tool_names(value: Any) -> tuple[str, ...]:
    """The list `tools` of the config. Raises ValueError if it is no list of names, or names a tool twice."""
    names = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"tools={value!r}: not a list of names. Write [your.module:function, calculator].")
    for index, name in enumerate(names):
        checked_name(name, f"tools.{index}", TOOLS)
        if name in names[:index]:
            raise ValueError(f"tools.{index}={name!r}: named twice. Keep one.")
    return tuple(names)
