"""Tasksets of the package verifiers, which runs in an interpreter of its own, without a network."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packages import python_with

from rlhf.config.environment import EnvironmentConfig
from rlhf.environments.adapters.verifiers import Verifiers, read_episode
from rlhf.environments.hosts import Hosts
from rlhf.environments.turns import FailedError
from rlhf.types import Outcome

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
REQUIREMENT = "verifiers>=0.4,<0.5"
CALLS = ("note", "calculator", "hints")  # what the model asks for, in its first turns
ARGUMENTS = {"note": {"text": "first"}, "calculator": {"expression": "12 * 34"}, "hints": {}}


def trace_of(**parts: Any) -> SimpleNamespace:
    data = SimpleNamespace(id=None, name="12x34", idx=3)
    usual = {"errors": [], "metrics": {}, "rewards": {}, "reward": 0.0, "stop_condition": "agent_completed"}
    return SimpleNamespace(**usual | {"task": SimpleNamespace(data=data)} | parts)


def test_a_reward_is_the_weighted_sum_and_every_part_of_it_is_logged_unweighted() -> None:
    rewards = {"right": SimpleNamespace(score=1.0, weight=1.0), "brief": SimpleNamespace(score=4.0, weight=0.5)}
    trace = trace_of(rewards=rewards, reward=3.0, metrics={"asked": 2.0, "score": 7.0})
    returned = read_episode(SimpleNamespace(ok=True, errors=[], traces=[trace]))
    named = {"right": 1.0, "brief": 4.0, "asked": 2.0, "score_": 7.0, "task": "12x34", "stop": "agent_completed"}
    assert returned == {"score": 3.0, **named}


def test_a_task_without_a_reward_leaves_the_judgement_to_others() -> None:
    assert read_episode(SimpleNamespace(ok=True, errors=[], traces=[trace_of()]))["score"] is None


def test_a_failed_episode_is_raised_with_the_line_that_failed_first() -> None:
    stack = (
        'File "a/own.py", line 7, in f\nE\n\nThe above exception was the direct cause of:\nFile "env.py", line 1, in g'
    )
    error = SimpleNamespace(type="TaskError", message="scoring: KeyError: 'x'", traceback=stack)
    with pytest.raises(RuntimeError, match=r"^a/own\.py:7: TaskError: scoring: KeyError: 'x'$"):
        read_episode(SimpleNamespace(ok=False, errors=[], traces=[trace_of(errors=[error])]))
    with pytest.raises(RuntimeError, match="2 runs of agents"):
        read_episode(SimpleNamespace(ok=True, errors=[], traces=[trace_of(), trace_of()]))


def test_an_interpreter_without_the_package_is_named_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"^environment\.name=verifiers: .*python.*pip install \"verifiers>=0\.4,<0\.5\""
    ):
        Verifiers("gsm8k", {})


# --- next to the package ---


@pytest.fixture(scope="module")
def python() -> Path:
    return python_with(REQUIREMENT)


class Model:
    """Asks for each tool once, where there are tools, then says `last`; a model of a limit says nothing after it."""

    def __init__(self, last: str, *, most: int = 9) -> None:
        self.last, self.most, self.requests = last, most, list[dict[str, Any]]()

    async def turn(self, request: Any) -> dict[str, Any]:
        self.requests.append(request)
        number = len(self.requests) - 1
        if number >= self.most:
            return {"role": "assistant", "content": "", "finish_reason": "length", "token_ids": []}
        said: dict[str, Any] = {"role": "assistant", "content": self.last, "finish_reason": "stop", "token_ids": [1, 2]}
        offered = [tool["function"]["name"] for tool in request["tools"]]
        if offered and number < len(CALLS):
            name = next(name for name in offered if name.endswith(CALLS[number]))
            function = {"name": name, "arguments": json.dumps(ARGUMENTS[CALLS[number]])}
            said |= {"content": "", "tool_calls": [{"id": f"call-{number}", "type": "function", "function": function}]}
        return said

    def answers(self) -> list[str]:
        return [message["content"] for message in self.requests[-1]["messages"] if message["role"] == "tool"]


@pytest.fixture(scope="module")
def opened(python: Path) -> Iterator[Hosts]:
    args = {"count": 12, "eval": 2}
    config = EnvironmentConfig(name="verifiers", id="products-v1", args=args, python=str(python), processes=1)
    before = os.getcwd()
    os.chdir(FIXTURES)  # where the module of the taskset is
    hosts = Hosts(config, say=lambda line: None)
    os.chdir(before)
    yield hosts
    hosts.close()


async def play(opened: Hosts, model: Model, number: int = 1, *, sample: int = 0, split: str = "train") -> Outcome:
    session = await opened.open({"number": number, "split": split, "epoch": 0}, {"group": number, "sample": sample})
    try:
        return await session.play(model.turn)
    finally:
        await session.close()


@pytest.mark.registry
@pytest.mark.slow
def test_rollouts_of_a_taskset_run_its_tools_hooks_and_rewards_without_a_network(opened: Hosts) -> None:
    generator = random.Random(0)
    draws = [generator.random() for _ in range(12)]  # the same on every node, where tasks are drawn

    async def check() -> None:
        models = [Model("compute") for _ in range(6)]
        outcomes = await asyncio.gather(
            *(play(opened, model, 1 + n // 2, sample=n % 2) for n, model in enumerate(models))
        )
        for number, (outcome, model) in enumerate(zip(outcomes, models, strict=True)):
            assert outcome.reward == 0.25 - 7 / 1024
            task = number // 2 + 2  # two are held out
            parts = {"asked": 2.0, "right": 0.0, "computed": 2.0, "length": 7.0, "drawn": draws[task]}
            assert outcome.parts == parts
            assert outcome.facts == {"task": f"{317 + task}x{999 - 7 * task}", "stop": "agent_completed"}
            noted, product, _ = model.answers()
            assert (noted, product) == ("first", "408")
            first = model.requests[0]["messages"]
            assert first == [{"role": "user", "content": f"What is {317 + task} * {999 - 7 * task}?"}]
            assert model.requests[0]["offered"] == model.requests[0]["tools"]
        hints = [model.answers()[2].split() for model in models]
        assert hints[0][0] == hints[1][0]  # a group is set up in one state
        assert hints[0][1] != hints[1][1]
        assert len({group for group, _ in hints}) == 3

    asyncio.run(check())
    assert opened.about[""]["rows"] == {"train": 10, "eval": 2}
    assert opened.sources["products_v1:taskset"].keys() >= {"products_v1.py"}  # a resumed run warns if it has changed
    assert [tool["function"]["name"] for tool in opened.about[""]["tools"]] == [
        "notes_note", "calculator", "group_hints",
    ]  # fmt: skip


@pytest.mark.registry
@pytest.mark.slow
def test_seeds_splits_limits_and_errors_of_a_taskset(opened: Hosts) -> None:
    async def check() -> None:
        again = [Model("compute"), Model("compute")]
        for model in again:
            await play(opened, model, 3, sample=1)
        assert again[0].requests == again[1].requests
        held_out = Model(str(317 * 999))
        assert (await play(opened, held_out, split="eval")).parts["right"] == 1.0
        limited = await play(opened, Model("compute", most=2))
        assert (limited.reward, limited.parts["asked"]) == (0.0, 2.0)
        where = r"products_v1\.py:\d+: TaskError: task Multiply scoring: KeyError: 'broken'"
        with pytest.raises(FailedError, match=where):
            await play(opened, Model("break"))
        with pytest.raises(FailedError, match="it has only 12 tasks"):
            await play(opened, Model("compute"), 11)

    asyncio.run(check())


TASKSET = """import verifiers.v1 as vf
class T(vf.Task): pass
class S(vf.Taskset[T]):
  def load(self): yield T(vf.TaskData(prompt='x'))
__all__ = ['S']
"""
MISTAKES = [  # code of the module `mine`, arguments, message
    ("import absent", {}, "environment.id=mine: No module named 'absent'. Install its package next to verifiers, or"),
    ("def load_environment(): pass", {}, "its module has no `__all__` with a taskset of `verifiers.v1`. Use a release"),
    (TASKSET + "def load(self): raise OSError('no hub')\nS.load = load", {}, "mine.py:6: OSError: no hub"),
    (TASKSET + "S.load = lambda self: []", {}, "its tasks cannot be loaded: LookupError: it has only 0 tasks"),
    (TASKSET + "T.NEEDS_CONTAINER = True", {}, "its tasks need a container. Run it by a service of yours"),
    (
        TASKSET + "class Box(vf.Toolset[vf.ToolsetConfig]): pass\n"
        "T.toolsets = staticmethod(lambda config: [Box(vf.ToolsetConfig(runtime=vf.DockerConfig()))])",
        {}, "environment.id=mine: its tools need a container (Box). Run it by a service of yours",
    ),
    (
        TASKSET + "class C(vf.EnvConfig):\n  a: vf.AgentConfig = vf.AgentConfig()\n"
        "  b: vf.AgentConfig = vf.AgentConfig()\n"
        "class E(vf.Env[C]):\n  async def run(self, task, agents): pass\n__all__ += ['E']",
        {}, "it has 2 agents (a, b), but a rollout has one reward. Run it by a service of yours",
    ),
    (TASKSET, {"splt": "a"}, "environment.args: splt='a': Extra inputs are not permitted. mine takes task, system_"),
    (TASKSET, {"id": "b"}, "environment.args.id=b: environment.id names the taskset. Remove the argument."),
    (TASKSET, {"eval": "b"}, "environment.args.eval='b': neither a number of tasks nor arguments of the taskset."),
    (TASKSET, {"eval": 1}, "environment.args.eval=1: the taskset has 1 tasks, so none would be left to train on. Hold"),
]  # fmt: skip
TRY = """
import json, sys
from rlhf.environments.adapters.verifiers import Verifiers
for module, arguments in json.load(sys.stdin):
    open("mine.py", "w").write(module)
    sys.modules.pop("mine", None)
    try:
        print(Verifiers("mine", arguments))
    except ValueError as error:
        print(error)
"""


@pytest.mark.registry
@pytest.mark.faults
def test_mistakes_are_named_with_key_reason_and_remedy(python: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "PYTHONDONTWRITEBYTECODE": "1"}
    asked = json.dumps([mistake[:2] for mistake in MISTAKES])
    done = subprocess.run(
        [python, "-c", TRY], input=asked, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    said = done.stdout.splitlines()
    assert len(said) == len(MISTAKES), done.stderr
    for line, (_, _, message) in zip(said, MISTAKES, strict=True):
        assert message in line
