"""Environments of other packages, each under an interpreter that has its package, with real servers and data sets."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from packages import python_with
from waiting import eventually, free_port

from rlhf.config.environment import EnvironmentConfig
from rlhf.environments.hosts import Hosts
from rlhf.types import Outcome

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.registry, pytest.mark.slow]

Said = Mapping[str, Any]


@contextmanager
def hosts(**keys: Any) -> Iterator[Hosts]:
    opened = Hosts(EnvironmentConfig(**keys), say=lambda line: None)
    try:
        yield opened
    finally:
        opened.close()


def play(
    opened: Hosts, rows: Sequence[Said], said: Callable[[Said, list[Said]], Said], group: int = 0
) -> list[Outcome]:
    """The outcomes of rollouts at the same time; `said` gives the model's turn from the request and earlier turns."""

    async def one(row: Said) -> Outcome:
        turns: list[Said] = []

        async def answer(request: Said) -> dict[str, Any]:
            turn = {
                "role": "assistant",
                "content": "",
                "finish_reason": "stop",
                "token_ids": [1],
                **said(request, turns),
            }
            turns.append(turn)
            return turn

        session = await opened.open(row, {"group": group, "sample": 0})
        try:
            return await session.play(answer)
        finally:
            await session.close()

    async def together() -> list[Outcome]:
        return [*await asyncio.gather(*map(one, rows))]

    return asyncio.run(together())


def row(number: int, split: str = "train", epoch: int = 0) -> Said:
    return {"number": number, "split": split, "epoch": epoch}


# --- reasoning_gym ---


@pytest.fixture(scope="module")
def reasoning_gym() -> str:
    return str(python_with("reasoning-gym==0.1.25"))


def summed(request: Said) -> str:
    """The sum that a question of `chain_sum` asks for."""
    (terms,) = re.findall(r": ([\d +-]+) =", request["messages"][-1]["content"])
    return str(sum(int(term.replace(" ", "")) for term in re.findall(r"[+-]? ?\d+", terms)))


def test_a_data_set_of_reasoning_gym_gives_prompts_and_judges_answers(reasoning_gym: str) -> None:
    asked: list[str] = []

    def said(request: Said, _: list[Said]) -> Said:
        asked.append(request["messages"][-1]["content"])
        assert "<answer>answer here</answer>" in request["messages"][0]["content"]
        return {"content": f"Well. <answer>{summed(request) if len(asked) % 2 else 'x'}</answer>"}

    with hosts(name="reasoning_gym", dataset="chain_sum", args={"size": 12, "seed": 7}, python=reasoning_gym) as opened:
        assert opened.about[""]["rows"] == {"train": 12, "eval": 12}
        sets = [("train", 0), ("train", 1), ("eval", 0)]
        for split, epoch in sets:
            outcomes = play(opened, [row(number, split, epoch) for number in range(1, 13)], said)
            assert sorted(outcome.reward or 0.0 for outcome in outcomes) == [0.0] * 6 + [1.0] * 6
        assert len(set(asked)) == 36  # no problem twice in an epoch, none of another epoch, none in both sets
        play(opened, [row(1, epoch=2047), row(1, epoch=2048)], said)
        assert len(set(asked)) == 37  # after 2048 epochs come those of the first, and not those of evaluation
        (outcome,) = play(opened, [row(1)], lambda *_: {"content": "5"})
        assert outcome.parts == {"answered": 0.0, "score_failed": 0.0}
        assert int(outcome.facts["answer"]) == int(summed({"messages": [{"content": asked[0]}]}))


def test_a_composite_of_reasoning_gym_mixes_data_sets_and_a_prompt_of_the_config_is_used(reasoning_gym: str) -> None:
    def said(request: Said, _: list[Said]) -> Said:
        assert [message["content"] for message in request["messages"][:-1]] == ["Say it in tags."]
        return {"content": "<answer>1</answer>"}

    parts = [{"name": "chain_sum"}, {"name": "leg_counting", "weight": 2, "config": {"max_animals": 4}}]
    args = {"datasets": parts, "size": 40, "system_prompt": "Say it in tags."}
    with hosts(name="reasoning_gym", dataset="composite", args=args, python=reasoning_gym) as opened:
        outcomes = play(opened, [row(number) for number in range(1, 41)], said)
        assert {outcome.facts["dataset"] for outcome in outcomes} == {"chain_sum", "leg_counting"}
        assert all(outcome.parts["answered"] for outcome in outcomes)


def test_a_data_set_that_cannot_be_made_is_refused(reasoning_gym: str) -> None:
    mistakes = [("leg_countin", {}), ("leg_counting", {"legs": 3}), ("leg_counting", {"min_animals": 0})]
    mistakes += [("leg_counting", {"seed": "x"}), ("leg_counting", {"size": 2**20 + 1})]
    mistakes += [("composite", {"datasets": [{"name": "leg_counting", "config": {"seed": 1}}]})]
    code = f"""
from rlhf.environments.adapters.reasoning_gym import ReasoningGym
for dataset, args in {mistakes}:
    try:
        ReasoningGym(dataset, args)
    except ValueError as error:
        print(error)
"""
    done = subprocess.run([reasoning_gym, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(
        r"environment\.dataset=leg_countin: reasoning_gym has no such data set\. Use leg_counting\.\n"
        r"environment\.args=\{'legs': 3\}: leg_counting: .*'legs'\. It takes min_animals, .*size\.\n"
        r"environment\.args=\{'min_animals': 0\}: leg_counting: min_animals must be positive\. It takes .*\.\n"
        r"environment\.args\.seed='x': not a whole number\. .*\n"
        r"environment\.args\.size=1048577: .*next epoch\. Use at most 1048576\.\n"
        r"environment\.args\.datasets: leg_counting: config\.seed=1: .* evaluation\. Remove it, or .*\n",
        done.stdout,
    )


# --- openenv ---

# the server of OpenEnv's template, one with tools, and one whose actions have two fields
SERVERS = """
import os, sys
import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from openenv.cli.commands.init import init

FOLDER = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(f"{FOLDER}/my_env"):
    init("my_env", FOLDER)
sys.path.insert(0, f"{FOLDER}/my_env")
from server.app import app as template

tools = FastMCP("adder")

@tools.tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

class Adder(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"task": f"Add 1 and 2 ({seed})."})

    async def step_async(self, action, timeout_s=None, **kwargs):
        said = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(said, CallToolObservation):
            said.reward, said.done = 0.5, said.result is not None and said.result.data == 3
        return said

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("only tools")

class Move(Action):
    "Move a piece."
    piece: str
    steps: int

class Board(Observation):
    shown: str = ""
    secret: str = "no"

class Game(Environment):
    state = State()

    def __init__(self):
        super().__init__()

    def reset(self, seed=None, episode_id=None, level=1, **kwargs):
        return Board(shown=f"level {level}")

    def step(self, action, timeout_s=None, **kwargs):
        return Board(shown=f"{action.piece} moved", reward=float(action.steps), done=action.steps > 4)

app, adder = FastAPI(), create_app(Adder, CallToolAction, CallToolObservation, max_concurrent_envs=8)
app.mount("/template", template)
app.mount("/tools", adder)
app.mount("/game", create_app(Game, Move, Board))
if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of the servers, and the file with their applications."""
    python, folder, port = python_with("openenv==0.10.0"), tmp_path_factory.mktemp("openenv"), free_port()
    (folder / "servers.py").write_text(SERVERS)
    command = [python, "servers.py", str(port)]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:

        def answers() -> bool:
            assert server.poll() is None
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/game/schema") as answer:
                    return bool(json.load(answer))
            except OSError:
                return False

        try:
            assert eventually(answers)
            yield f"http://localhost:{port}", f"{folder}/servers.py"
        finally:
            server.terminate()


@pytest.fixture
def openenv(servers: tuple[str, str]) -> str:
    return servers[0]


def calls(*made: tuple[str, dict[str, Any]]) -> Said:
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in made]
    return {"tool_calls": [{"id": str(i), "type": "function", "function": each} for i, each in enumerate(functions)]}


def test_the_server_of_openenvs_template_gets_the_models_text_and_rollouts_wait_for_its_only_place(
    openenv: str,
) -> None:
    heard: list[str] = []

    def said(request: Said, turns: list[Said]) -> Said:
        heard.append(request["messages"][-1]["content"])
        assert request["tools"] == []
        return {"content": "hello"} if not turns else {"content": "ab", "finish_reason": "length"}

    with hosts(name="openenv", url=f"{openenv}/template") as opened:
        outcomes = play(opened, [row(number) for number in range(1, 4)], said)
    assert [(outcome.reward, outcome.parts) for outcome in outcomes] == [
        (pytest.approx(0.7), {"steps": 2.0, "errors": 0.0})
    ] * 3
    assert heard[:2] == [
        "echoed_message: My Env environment ready!\nmessage_length: 0",
        "echoed_message: hello\nmessage_length: 5",
    ]


def test_tools_that_a_server_offers_are_the_models_and_their_errors_are_answers(openenv: str) -> None:
    heard: list[Any] = []

    def said(request: Said, turns: list[Said]) -> Said:
        heard.append(request["messages"][-1]["content"])
        (tool,) = request["tools"]
        assert tool["function"]["name"] == "add"
        assert tool["function"]["parameters"]["required"] == ["a", "b"]
        return [calls(("add", {"a": 1}), ("subtract", {})), calls(("add", {"a": 1, "b": 2}), ("add", {}))][len(turns)]

    with hosts(name="openenv", url=f"{openenv}/tools", args={"reward": "last"}) as opened:
        (outcome,) = play(opened, [row(1)], said)
        first = heard[0]
        play(
            opened, [row(2)], lambda request, _: heard.append(request["messages"][-1]["content"]) or {"content": "."}, 1
        )
    assert (outcome.reward, outcome.parts) == (0.5, {"steps": 3.0, "errors": 0.0})  # the last call came after the end
    assert first.startswith("Add 1 and 2 (")
    assert heard[-1] != first  # another group has another seed
    assert "subtract" in heard[1]


def test_an_action_with_several_fields_is_a_tool(openenv: str) -> None:
    heard: list[Any] = []

    def said(request: Said, turns: list[Said]) -> Said:
        heard.append(request["messages"][-1]["content"])
        (tool,) = request["tools"]
        assert (tool["function"]["name"], [*tool["function"]["parameters"]["properties"]]) == (
            "act",
            ["piece", "steps"],
        )
        return calls(("act", {"piece": "rook", "steps": 3 + len(turns)}), ("act", {"piece": "rook"}))

    args = {"observation": "shown", "reset": {"level": 2}}
    with hosts(name="openenv", url=f"{openenv}/game", args=args) as opened:
        (outcome,) = play(opened, [row(1)], said)
    assert heard[0] == "level 2"
    assert "steps" in heard[1]  # the field that the second call lacks
    assert (outcome.reward, outcome.parts) == (12.0, {"steps": 3.0, "errors": 2.0})


@pytest.mark.parametrize(
    ("path", "args", "parts"),
    [
        ("/nothing", {}, [r"^environment\.url=http://localhost:\d+/nothing: no server of OpenEnv", "404", "uvicorn"]),
        ("/game", {"action": "pawn"}, [r"^environment\.args\.action=pawn: its actions have piece, steps\. "]),
        ("/tools", {"action": "add"}, [r"^environment\.args\.action=add: it offers tools of its own"]),
        ("/game", {"actions": "piece"}, [r"^environment\.args\.actions: openenv has no such argument\. Use action, "]),
        ("/game", {"reward": "mean"}, [r"^environment\.args\.reward=mean: .* Use sum or last"]),
    ],
)
def test_a_server_or_argument_that_does_not_fit_is_refused(
    openenv: str, path: str, args: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ValueError, match=r".") as refused, hosts(name="openenv", url=openenv + path, args=args):
        pass
    assert all(re.search(part, str(refused.value)) for part in parts), refused.value


def test_an_application_runs_in_the_processes_of_the_environment_without_a_server(servers: tuple[str, str]) -> None:
    app, python = f"{servers[1]}:adder", str(python_with("openenv==0.10.0"))
    made = calls(("add", {"a": 1, "b": 2}))
    with hosts(name="openenv", app=app, python=python) as opened:
        assert opened.about[""]["tools"][0]["function"]["name"] == "add"
        assert app in opened.sources
        outcomes = play(opened, [row(number) for number in range(1, 13)], lambda *_: made)
    assert [outcome.reward for outcome in outcomes] == [0.5] * 12  # eight at the same time


# --- without a package or a server ---


def test_an_application_that_cannot_be_imported_is_named_with_the_reason() -> None:
    said = r"^environment\.app=maze\.server:app: .*No module named 'maze'.*`environment\.python`"
    with pytest.raises(ValueError, match=said), hosts(name="openenv", app="maze.server:app"):
        pass


def test_a_missing_package_is_named_with_the_commands_that_install_it() -> None:
    said = r"^environment\.name=reasoning_gym: .*pip install reasoning-gym`, and set environment\.python="
    with pytest.raises(ValueError, match=said), hosts(name="reasoning_gym", dataset="leg_counting"):
        pass


def test_a_server_that_nobody_has_started_is_named_with_the_command_that_starts_it(tmp_path: Path) -> None:
    said = r"^environment\.url=http://127\.0\.0\.1:\d+: no server .*Connection refused.*uvicorn server\.app:app"
    with pytest.raises(ValueError, match=said), hosts(name="openenv", url=f"http://127.0.0.1:{free_port()}"):
        pass
