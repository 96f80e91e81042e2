"""An environment answers as it does in TRL 1.16, and what is ours in addition."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S

from rlhf.config.environment import BUILT_IN
from rlhf.environments.contract import Environment, Episode, content_text
from rlhf.environments.serve import load
from rlhf.processes.attributes import EnvironmentView

ROOT = Path(__file__).parents[2]
CLASSES = str(Path(__file__).parent / "trl_classes.py")
SEEDS = {"group": 7, "sample": 0}


def call(name: str, arguments: Any = "{}") -> dict[str, Any]:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": written}}


def contents(said: dict[str, Any]) -> list[Any]:
    return [answer["content"] for answer in said["answers"]]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Environment]:
    """An environment from the source of its class `Env`."""

    def make(source: str, name: str = "Env", **arguments: Any) -> Environment:
        file = tmp_path / f"env{len(list(tmp_path.iterdir()))}.py"
        file.write_text(f"import asyncio, random\n{source}")
        return Environment(f"{file}:{name}", **arguments)

    return make


def run(environment: Environment, *turns: list[dict[str, Any]], row: Any = None, seeds: Any = SEEDS) -> list[Any]:
    """[what reset says, what each turn says, what finish says]"""

    async def rollout() -> list[Any]:
        episode = environment.episode()
        said: list[Any] = [await episode.reset(row or {}, seeds)]
        said += [await episode.call(turn) for turn in turns]
        said.append(await episode.finish())
        await episode.close()
        return said

    return asyncio.run(rollout())


# --- as in TRL ---


def test_public_methods_are_tools_in_order_of_their_names_after_the_functions() -> None:
    environment = Environment(f"{CLASSES}:Shop", tools=[f"{CLASSES}:add"])
    assert [tool["function"]["name"] for tool in environment.tools] == ["add", "buy", "look"]
    assert environment.name == "Shop"
    assert not environment.has_reward


def test_the_answers_of_a_turn_are_those_of_functions_then_those_of_coroutines() -> None:
    environment = Environment(f"{CLASSES}:Slow")
    turn = [
        call("note", {"text": "abc"}),
        call("count"),
        call("note", {"text": ""}),
        call("nope"),
        call("note", {"text": "b"}),
    ]
    _, said, finished = run(environment, turn)
    assert said["answers"] == [
        {"role": "tool", "name": "count", "content": "0"},
        {"role": "tool", "name": "nope", "content": "{'error': 'Tool nope not found.'}"},
        {"role": "tool", "name": "note", "content": "noted abc"},
        {"role": "tool", "name": "note", "content": "{'error': \"'empty'\"}"},
        {"role": "tool", "name": "note", "content": "noted b"},
    ]
    assert said["errors"] == 2
    assert not said["done"]
    assert finished["reward"] == 2.0


def test_coroutines_of_one_turn_run_together(made: Callable[..., Environment]) -> None:
    environment = made("""
class Env:
    def reset(self): self.inside = self.most = 0
    async def wait(self) -> int:
        "Wait."
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0.01)
        self.inside -= 1
        return self.most
""")
    assert contents(run(environment, [call("wait")] * 3)[1]) == ["3", "3", "3"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (call("add", {"a": 1, "b": 2}), "3"),
        (call("add", {"a": 1}), "add() missing 1 required positional argument: 'b'"),
        (call("add", {"a": 1, "b": 2, "c": 3}), "add() got an unexpected keyword argument 'c'"),
        (call("add", [1, 2]), "add() argument after ** must be a mapping, not list"),
        (call("add", '{"a": 1'), "The arguments are not valid JSON"),
        (call("add", {"a": 1, "b": "x"}), "unsupported operand type"),
        ({**call("add"), "type": "custom"}, "Unsupported tool call type: custom"),
        ({"type": "custom", "name": "odd"}, "Unsupported tool call type: custom"),
        (call("__class__"), "Tool __class__ not found."),
        (call("reset"), "Tool reset not found."),
    ],
)
def test_invalid_calls_are_answered(asked: dict[str, Any], expected: str) -> None:
    said = run(Environment(tools=[f"{CLASSES}:add"]), [asked])[1]
    assert len(said["answers"]) == 1
    assert expected in said["answers"][0]["content"]
    assert said["errors"] == (expected != "3")


def test_a_class_ends_no_rollout_by_an_attribute_and_says_game_over_as_an_error() -> None:
    random.seed(0)
    environment = Environment(f"{CLASSES}:GuessTheNumber")
    secret = run(environment)[-1]["attributes"]["values"]["_secret"]
    reset, right, again, finished = run(
        environment, [call("guess", {"number": secret})], [call("guess", {"number": 1})]
    )
    assert reset == {"messages": None, "text": "Find the number from 1 to 100."}
    answer = {"role": "tool", "name": "guess", "content": "Correct!"}
    assert right == {"answers": [answer], "done": False, "errors": 0, "faults": []}
    assert contents(again) == ["{'error': 'Game over.'}"]
    assert finished["reward"] == 1.0


def test_a_list_stays_a_list_and_a_template_reads_it_as_text() -> None:
    said = run(
        Environment(f"{CLASSES}:Shop"), [call("buy", {"drink": "tea"}), call("look")], row={"prompt": [], "budget": 9}
    )[1]
    assert contents(said) == ["{'spent': 2}", ["tea"]]
    assert content_text(["tea"]) == "['tea']"
    assert content_text([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"


def test_instances_are_made_once_and_reset_often() -> None:
    environment = Environment(f"{CLASSES}:Shop")
    row = {"prompt": [], "budget": 9}
    assert [run(environment, row=row)[-1]["attributes"]["values"]["made"] for _ in range(3)] == [1, 2, 3]

    async def two() -> list[Any]:
        together = [environment.episode(), environment.episode()]
        for episode in together:
            await episode.reset(row)
        made = [(await episode.finish())["attributes"]["values"]["made"] for episode in together]
        await together[0].close(broken=True)
        await together[1].close()
        return made

    assert asyncio.run(two()) == [4, 1]
    assert run(environment, row=row)[-1]["attributes"]["values"]["made"] == 2


def test_a_class_without_reset_an_unknown_name_and_a_tool_without_docstring_are_refused(
    made: Callable[..., Environment],
) -> None:
    for source, reason in [
        ("class Env: pass", "no method `reset`"),
        ("class Env:\n    def reset(self): pass\n    def go(self): pass", "Env.go cannot be offered.*no docstring"),
        ("class Env:\n    def __init__(self, x): pass\n    def reset(self): pass", "cannot be made: TypeError"),
        ("class Other: pass", "no class or function Env"),
        ("1 / 0", "ZeroDivisionError"),
    ]:
        with pytest.raises(ValueError, match=reason):
            made(source)
    with pytest.raises(ValueError, match="ModuleNotFoundError"):
        Environment("no_such_module:Env")
    with pytest.raises(ValueError, match="calculator or python"):
        Environment("calculater")
    with pytest.raises(ValueError, match="name of its own"):
        Environment(tools=["calculator", "calculator"])
    with pytest.raises(ValueError, match="unexpected keyword argument"):
        Environment("python", options={"minutes": 1})


# --- ours ---


def test_reset_may_return_messages_or_text_blocks_and_takes_the_columns_that_it_names(
    made: Callable[..., Environment],
) -> None:
    environment = made("""
class Env:
    async def reset(self, kind, seed=None):
        self.seed = seed
        if kind == "messages":
            return [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        return [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}] if kind == "blocks" else 3
""")
    said, finished = run(environment, row={"kind": "messages", "other": 1})
    assert said == {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], "text": None}
    assert isinstance(finished["attributes"]["values"]["seed"], int)
    assert run(environment, row={"kind": "messages", "seed": 5})[-1]["attributes"]["values"]["seed"] == 5
    assert run(environment, row={"kind": "messages"}, seeds=None)[-1]["attributes"]["values"]["seed"] is None
    assert run(environment, row={"kind": "blocks"})[0] == {"messages": None, "text": "ab"}
    with pytest.raises(TypeError, match=r"Env.reset returned int"):
        run(environment, row={"kind": "number"})
    with pytest.raises(TypeError, match="missing 1 required"):
        run(environment)


@pytest.mark.parametrize(
    "declared",
    [
        "done = False",
        "@property\n    def done(self): return self.over",
        "def done(self) -> bool: return self.over",
    ],
)
def test_done_in_the_body_of_a_class_ends_the_rollout(made: Callable[..., Environment], declared: str) -> None:
    environment = made(f"""
class Env:
    {declared}
    def reset(self): self.over = False
    def stop(self) -> str:
        "Stop."
        self.over = True
        if type(self).done is False: self.done = True
        return "stopped"
    def go(self) -> str:
        "Go."
        return "went"
""")
    assert [tool["function"]["name"] for tool in environment.tools] == ["go", "stop"]
    assert [said["done"] for said in run(environment, [call("go")], [call("stop")])[1:3]] == [False, True]


def test_a_method_done_that_does_not_return_a_bool_is_a_tool(made: Callable[..., Environment]) -> None:
    environment = made("""
class Env:
    def reset(self): pass
    def done(self) -> str:
        "Say that you are done."
        return "ok"
""")
    assert [tool["function"]["name"] for tool in environment.tools] == ["done"]
    assert run(environment, [call("done")])[1]["done"] is False


def test_a_call_that_could_not_be_read_is_answered_with_its_error_and_the_others_are_made() -> None:
    environment = Environment(tools=["calculator"])
    unread = {**call("calculator", "1 +"), "error": "Write it again."}
    answer = run(environment, [unread, call("calculator", {"expression": "1 + 2"})])[1]
    assert [one["content"] for one in answer["answers"]] == ["{'error': 'Write it again.'}", "3"]
    assert answer["errors"] == 1


def test_an_error_of_a_tool_names_no_place_of_this_machine_but_those_that_the_model_named_itself(
    made: Callable[..., Environment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, python = tmp_path / "home", Path(sys.executable).name
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    monkeypatch.setenv("HOME", str(home))
    environment = made("""
import os, sys, tempfile, traceback
class Env:
    def reset(self): pass
    def fail(self, text: str):
        '''Fail.

        Args:
            text: why, with {own}, {home}, {python}.
        '''
        raise OSError(text.format(own=tempfile.gettempdir(), home=os.path.expanduser("~"), python=sys.executable))
    async def fail_later(self, text: str):
        '''Fail later.

        Args:
            text: why.
        '''
        await asyncio.sleep(0)
        self.fail(text)
    def tell(self):
        '''Tell.'''
        try: open(tempfile.gettempdir() + "/notes.txt")
        except OSError: return traceback.format_exc()
    def load(self, name: str):
        '''Load.

        Args:
            name: of a board.
        '''
        open(name if name.startswith("/") else "/no/such/boards/" + name)
""")
    for text, told in [
        ("no file {own}/a/b.txt.", "no file ./a/b.txt."),
        ("in {own}: no", "in .: no"),
        ("'{home}/runs/x/log.txt', {python}", f"'log.txt', {python}"),
        ("see {own}. Or file://{home}/a.txt", "see .. Or file://a.txt"),
        (f"{home}/mine.txt is not there", f"{home}/mine.txt is not there"),
        ("GET https://host/api/v1 and 1/2", "GET https://host/api/v1 and 1/2"),
    ]:
        for name in ("fail", "fail_later"):
            (answer,) = contents(run(environment, [call(name, {"text": text})])[1])
            assert answer == str({"error": told})
    (answer,) = contents(run(environment, [call("tell")])[1])
    assert "'./notes.txt'" in answer
    assert re.search(r'File "env\d\.py", line', answer)
    for name in ("b.txt", "/no/b.txt"):
        (answer,) = contents(run(environment, [call("load", {"name": name})])[1])
        assert answer == str({"error": f"[Errno 2] No such file or directory: '{name}'"})


def test_get_reward_may_give_named_numbers_and_facts_are_told(made: Callable[..., Environment]) -> None:
    environment = made("""
class Env:
    def reset(self, result): self.result, self.facts = result, {"way": (1, 2), 3: {4}, "text": chr(0xD800)}
    def get_reward(self): return eval(self.result)
""")

    def finished(result: str) -> dict[str, Any]:
        return run(environment, row={"result": result})[-1]

    assert finished("{'score': True, 'speed': 2}")["reward"] == 1.0
    assert finished("{'score': 1, 'speed': 2}")["parts"] == {"speed": 2.0}
    assert finished("None")["reward"] is None
    assert finished("1")["facts"] == {"way": [1, 2], "3": [4], "text": "\\ud800"}
    assert finished("{'score': 1, 'pred': '42', 'way': 'x'}")["facts"] == {**finished("1")["facts"], "pred": "42"}
    for result, error in [
        ("'1'", TypeError),
        ("float('nan')", ValueError),
        ("{'speed': 1}", ValueError),
        ("{'score': 'high'}", TypeError),
        ("1/0", ZeroDivisionError),
    ]:
        with pytest.raises(error):
            finished(result)


def test_close_is_no_tool_and_is_called_at_the_end_and_for_a_broken_instance(made: Callable[..., Environment]) -> None:
    environment = made("""
class Env:
    closed = 0
    def reset(self): pass
    async def close(self): Env.closed += 1
""")
    assert environment.tools == []
    assert environment.coroutines == ("close",)

    async def closed() -> int:
        episode = environment.episode()
        counted = (await episode.finish())["attributes"]["values"]["closed"]
        await episode.close()
        return counted

    async def rollouts() -> list[int]:
        first, second = environment.episode(), environment.episode()
        await first.close(broken=True)
        await second.close()
        counts = [await closed()]
        await environment.close()
        return [*counts, await closed()]

    assert asyncio.run(rollouts()) == [1, 2]


def test_an_instance_of_a_class_is_made_for_the_first_rollout_and_one_of_a_function_is_tried(
    made: Callable[..., Environment],
) -> None:
    source = """
class Env:
    alive = 0
    def __init__(self): Env.alive += 1
    def reset(self): pass
    def close(self): Env.alive -= 1
    @staticmethod
    def double(x: int) -> int:
        '''Double.

        Args:
            x: A number.
        '''
        return 2 * x
def make(): return Env()
"""
    for name in ("Env", "make"):
        environment = made(source, name)
        assert [tool["function"]["name"] for tool in environment.tools] == ["double"]
        said, finished = run(environment, [call("double", {"x": 2})])[1:]
        assert (contents(said), finished["attributes"]["values"]["alive"]) == (["4"], 1)
    with pytest.raises(ValueError, match="cannot be made: TypeError: got an unexpected keyword argument 'level'"):
        made(source, options={"level": 3})


def test_only_an_environment_of_coroutines_may_share_its_process(made: Callable[..., Environment]) -> None:
    assert Environment(f"{CLASSES}:Slow").blocking == ("count", "reset")
    assert Environment("python", tools=["calculator"]).blocking == ()
    assert Environment(tools=[f"{CLASSES}:add", "calculator"]).blocking == ("add",)
    source = "class Env:\n    async def reset(self): pass\n    def close(self): pass"
    assert made(source).blocking == ()


def test_without_coroutines_no_event_loop_is_needed() -> None:
    episode = Environment(f"{CLASSES}:GuessTheNumber").episode()
    for coroutine in (
        episode.reset({}, SEEDS),
        episode.call([call("guess", {"number": 1})]),
        episode.finish(),
        episode.close(),
    ):
        with pytest.raises(StopIteration):
            coroutine.send(None)


# --- nothing that a tool returns or raises breaks the protocol ---

HOSTILE = """
class Odd:
    def __str__(self): raise RuntimeError("no text")
class Env:
    def reset(self): pass
    def big(self) -> str:
        "Big."
        return "x" * 10_000_000
    def big_list(self) -> list:
        "Big."
        return ["x" * 1000] * 1000
    def invalid(self) -> str:
        "Invalid UTF-8."
        return b"a\\xff".decode("utf-8", "surrogateescape")
    def invalid_list(self) -> list:
        "Invalid UTF-8."
        return [{"k\\udcff": "v\\ud800"}]
    def octets(self) -> bytes:
        "Bytes."
        return b"\\xff"
    def odd(self) -> str:
        "Odd."
        return Odd()
    def odd_list(self) -> list:
        "Odd."
        return [{1, 2}]
    def leave(self) -> str:
        "Leave."
        raise SystemExit("left")
    async def leave_later(self) -> str:
        "Leave."
        raise SystemExit("left")
    def interrupt(self) -> str:
        "Interrupt."
        raise KeyboardInterrupt
    async def cancel(self) -> str:
        "Cancel."
        raise asyncio.CancelledError
    def deep(self) -> str:
        "Recurse."
        return self.deep()
    def full(self) -> str:
        "Use all memory."
        raise MemoryError
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("big", "x" * 100_000 + "\n[9900000 more characters were cut]"),
        ("invalid", "a\\udcff"),
        ("invalid_list", [{"k\\udcff": "v\\ud800"}]),
        ("octets", "b'\\xff'"),
        ("odd", "{'error': 'no text'}"),
        ("odd_list", "[{1, 2}]"),
        ("leave", "{'error': 'left'}"),
        ("leave_later", "{'error': 'left'}"),
        ("interrupt", "{'error': ''}"),
        ("cancel", "{'error': 'CancelledError'}"),
        ("deep", "{'error': 'maximum recursion depth exceeded'}"),
    ],
)
def test_whatever_a_tool_does_there_is_one_answer(made: Callable[..., Environment], name: str, expected: Any) -> None:
    said = run(made(HOSTILE), [call(name)])[1]
    assert contents(said) == [expected]
    json.dumps(said, ensure_ascii=False).encode()


def test_a_long_list_is_cut_as_text_and_a_name_is_made_printable(made: Callable[..., Environment]) -> None:
    said = run(made(HOSTILE), [call("big_list"), call("\ud800")])[1]
    assert contents(said)[0].endswith("more characters were cut]")
    assert said["answers"][1] == {
        "role": "tool",
        "name": "\\ud800",
        "content": "{'error': 'Tool \\\\ud800 not found.'}",
    }


def test_memory_that_has_run_out_is_no_answer(made: Callable[..., Environment]) -> None:
    with pytest.raises(MemoryError):
        run(made(HOSTILE), [call("full")])


# --- seeds ---

RANDOM = """
import numpy
class Env:
    def reset(self): self.start = [random.random(), float(numpy.random.random())]
    async def draw(self, wait: float) -> str:
        '''Draw.

        Args:
            wait: Seconds.
        '''
        first = random.random()
        await asyncio.sleep(wait)
        return f"{first} {random.random()} {numpy.random.random()}"
"""


def test_a_group_starts_in_one_state_and_its_members_go_on_in_their_own(made: Callable[..., Environment]) -> None:
    environment = made(RANDOM)
    turn = [call("draw", {"wait": 0})]
    said = {
        (group, sample): run(environment, turn, turn, seeds={"group": group, "sample": sample})
        for group in (0, 1) for sample in (0, 1)
    }  # fmt: skip
    starts = {key: value[-1]["attributes"]["values"]["start"] for key, value in said.items()}
    assert starts[0, 0] == starts[0, 1] != starts[1, 0]
    assert len({text for value in said.values() for turn in value[1:3] for text in contents(turn)}) == 8
    assert run(environment, turn, turn, seeds={"group": 0, "sample": 0}) == said[0, 0]


def test_the_random_state_is_swapped_with_the_rollout(made: Callable[..., Environment]) -> None:
    environment = made(RANDOM)
    alone = [
        contents(run(environment, [call("draw", {"wait": 0})], seeds={"group": 0, "sample": s})[1]) for s in (0, 1)
    ]

    async def one(episode: Episode, sample: int) -> list[Any]:
        await episode.reset({}, {"group": 0, "sample": sample})
        said = await episode.call([call("draw", {"wait": 0.01 * (2 - sample)})])
        return contents(said)

    async def together() -> list[Any]:
        return await asyncio.gather(*(one(environment.episode(), sample) for sample in (0, 1)))

    random.seed(3)
    expected = random.random()
    random.seed(3)
    assert asyncio.run(together()) == alone
    assert random.random() == expected


# --- attributes ---


def test_attributes_are_read_elsewhere_as_they_were() -> None:
    environment = Environment(f"{CLASSES}:Shop")
    finished = run(environment, [call("buy", {"drink": "coffee", "count": 2})], row={"prompt": [], "budget": 9})[-1]
    view: Any = EnvironmentView(json.loads(json.dumps(finished["attributes"])))
    assert (view._spent, view._basket, view.left, view.PRICES) == (6, ["coffee"], 3, {"tea": 2, "coffee": 3})
    assert (view.position, view.counts, view.board) == ((0, 0), {1: "one"}, [0.0, 0.0])
    shop = sys.modules[os.path.realpath(CLASSES)].Shop
    assert isinstance(view, shop)
    assert not isinstance(view, Environment)
    with pytest.raises(AttributeError, match=r"Shop\.buy cannot be read here: it is a method"):
        view.buy(drink="tea")
    with pytest.raises(AttributeError, match="no such attribute"):
        _ = view.nothing
    assert not hasattr(view, "nothing")


def test_an_attribute_that_cannot_be_said_has_a_reason(made: Callable[..., Environment]) -> None:
    environment = made("""
import enum, numpy
class Color(enum.Enum): RED = 1
class Level(enum.IntEnum): LOW = 1
class Env:
    __slots__ = ("slot", "__dict__")
    def reset(self):
        self.slot = {1, 2}
        self.lock, self.color, self.level = object(), Color.RED, Level.LOW
        self.number, self.flag, self.table = numpy.float32(0.5), numpy.bool_(True), numpy.eye(2)
        self.long, self.mark = "x" * 300_000, {"@set": [1]}
        self.circle = []
        self.circle.append(self.circle)
    @property
    def broken(self): return 1 / 0
""")
    attributes = json.loads(json.dumps(run(environment)[-1]["attributes"]))
    view: Any = EnvironmentView(attributes)
    assert (view.slot, view.level, view.number, view.flag) == ({1, 2}, 1, 0.5, True)
    assert (view.table, view.mark) == ([[1.0, 0.0], [0.0, 1.0]], {"@set": [1]})
    for name, reason in {
        "lock": "builtins.object", "color": "Color", "broken": "ZeroDivisionError", "long": "200000 characters",
        "circle": "Recursion",
    }.items():  # fmt: skip
        with pytest.raises(AttributeError, match=reason):
            getattr(view, name)


# --- who gets the answer ---

READERS = """
import dataclasses
COLUMN = ("answer",)[0]
class Names:
    def reset(self, Answer, **row): pass
class Reads:
    def reset(self, **row): self.row = row
    def get_reward(self): return (lambda: self.row["answer"])()
class Loops:
    def reset(self, **row): self.row = {name: row[name] for name in ("tests", "answer")}
class Uses:
    def reset(self, **row): look(row)
def look(row): return Deep(row)
class Deep:
    def __init__(self, row): self.gold = row.get("answer")
class Sub(Reads): pass
class Takes:
    def reset(self, **row): self.row = row
    def submit(self, answer: str) -> str:
        '''Submit.

        Args:
            answer: Yours.
        '''
        return answer
class Constant:
    def reset(self, **row): self.row = row.get(COLUMN)
class Base:
    KEY = "Answer"
    @classmethod
    def gold(cls, row): return row.get(cls.KEY)
class Heir(Base):
    @property
    def told(self): return self.row["tests"]
    def reset(self, **row): self.row = self.gold(row)
@dataclasses.dataclass
class Row:
    answer: str
class Fields:
    def reset(self, **row): self.row = Row(**row)
class Default:
    def reset(self, key="answer", **row): self.row = row.get(key)
class Option:
    def __init__(self, key=""): self.key = key
    def reset(self, **row): self.row = row.get(self.key)
WORDS = {*map(str, range(999)), "answer"}
class Game:
    def reset(self, **row): self.row = row
    def guess(self, word: str) -> bool:
        '''Guess.

        Args:
            word: Yours.
        '''
        return word in WORDS
class Hidden:
    def reset(self, **row): self.row = row["".join(["ans", "wer"])]
async def play(row, generate): return float(row["answer"])
async def keeps(row, generate): return 0.0
"""


@pytest.mark.parametrize(
    ("name", "withheld"),
    [
        ("Names", ["tests"]), ("Reads", ["tests"]), ("Loops", []), ("Uses", ["tests"]), ("Sub", ["tests"]),
        ("Constant", ["tests"]), ("Heir", []), ("Fields", ["tests"]), ("Default", ["tests"]), ("Option", ["answer"]),
        ("Game", ["answer", "tests"]), ("Takes", ["answer", "tests"]), ("Hidden", ["answer", "tests"]),
        ("play", ["tests"]), ("keeps", ["answer", "tests"]), ("calculator", ["answer", "tests"]),
        ("program", ["answer", "tests"]), ("service", []),
    ],
)  # fmt: skip
def test_rows_leave_out_the_answers_that_no_code_names(tmp_path: Path, name: str, withheld: list[str]) -> None:
    (tmp_path / "readers.py").write_text(READERS)
    part: dict[str, Any] = {"name": name if name in BUILT_IN else f"{tmp_path / 'readers.py'}:{name}", "options": {}}
    part["options"] = {"key": "tests"} if name == "Option" else {}
    part["program"] = {"command": [sys.executable], "timeout_s": None, "env": []}
    hello = {"tools": [], "wall_seconds": 1.0, "answers": ["answer", "tests"]}
    for gives, left_out in ((False, withheld), (True, [])):
        _, about = load({**hello, "environments": {"": {**part, "gives_answer": gives}}})
        assert about[""]["withheld"] == left_out


# --- where it runs ---


@pytest.mark.parametrize("python", [sys.executable, "python3.10"])
def test_the_process_of_an_environment_needs_nothing_but_the_standard_library(python: str, tmp_path: Path) -> None:
    """Isolated, without site-packages; the oldest Python that an environment may need, where it is installed."""
    (tmp_path / "game.py").write_text(
        "class Env:\n    def reset(self, **row): self.row = row\n"
        "    async def say(self, text: str | None = None) -> str:\n"
        '        """Say.\n\n        Args:\n            text: What.\n        """\n        return text or "nothing"\n'
        "    def get_reward(self): return 0.5\n"
    )
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import asyncio
from rlhf.processes.attributes import EnvironmentView
from rlhf.environments.contract import Environment
environment = Environment({str(tmp_path / "game.py:Env")!r}, tools=["calculator", "python"])
def call(name, arguments): return {{"type": "function", "function": {{"name": name, "arguments": arguments}}}}
async def main():
    episode = environment.episode()
    await episode.reset({{"a": 1}}, {{"group": 0, "sample": 0}})
    turn = [call("say", "{{}}"), call("calculator", '{{"expression": "2*3"}}')]
    said = await episode.call([*turn, call("python", '{{"code": "print(7)"}}')])
    finished = await episode.finish()
    assert [answer["content"] for answer in said["answers"]] == ["nothing", "6", "7\\n"], said
    assert finished["reward"] == 0.5 and EnvironmentView(finished["attributes"]).row == {{"a": 1}}
    await environment.close()
asyncio.run(main())
known = set(sys.stdlib_module_names) | {{"rlhf", "__main__"}}
print(sorted({{name.partition(".")[0] for name in sys.modules}} - known - {{{str(tmp_path / "game")!r}}}))
"""
    if shutil.which(python) is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip(f"{python} is not installed")
    done = subprocess.run([python, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stderr == ""
    assert done.stdout == "[]\n"
