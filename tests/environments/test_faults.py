"""Of what a tool raises it is known whether the tool is broken, or was asked for what it does not do."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

import pytest

from rlhf.environments.contract import Environment
from rlhf.environments.schema import example, fits, json_schema

CLASS = '''import importlib, json, math, os, re

from rlhf.processes.confinement import NO_NETWORK, NoNetworkError

class Refusal(Exception): pass
class Unknown(RuntimeError): pass

class Env:
    def reset(self, **row): self.prices, self.client = {"tea": 3}, None
    def _price(self, item): return self.prices[item]
    def _meets(self, error): (one for one in ()).throw(error)  # as a library does

    %sdef use(
        self, text: str, number: int = 1, table: dict[str, int] = {}, more: list = [], query: Refusal = None
    ) -> str:
        """Use.

        Args:
            text: Text.
            number: Number.
            table: Table.
            more: More.
            query: Query.
        """
%s
'''
FIRST_LINE = 25  # of the body


def faults_of(tmp_path: Path, body: str, arguments: dict[str, Any], *, kind: str = "") -> list[tuple[bool, str]]:
    """[(whether the tool with this body is broken, what is said)]; [] for an error that is the model's to read."""
    file = tmp_path / f"tool{len(list(tmp_path.iterdir()))}.py"
    file.write_text(CLASS % (kind, indent(body, 8 * " ")))

    async def rollout() -> dict[str, Any]:
        episode = Environment(f"{file}:Env").episode()
        await episode.reset({})
        return await episode.call([{"function": {"name": "use", "arguments": json.dumps({"text": "tea"} | arguments)}}])

    said = asyncio.run(rollout())
    assert said["errors"] == 1
    assert all(fault["tool"] == "use" for fault in said["faults"])
    return [(fault["is_broken"], fault["said"].replace(f"{file}:", "")) for fault in said["faults"]]


BROKEN = {
    "return self.prices[txt]": "NameError: name 'txt' is not defined",
    "print(found); found = 1": "UnboundLocalError: ",
    "import numpyy": "ModuleNotFoundError: No module named 'numpyy'",
    "from os import nothing": "ImportError: cannot import name 'nothing'",
    "importlib.import_module('numpyy')": "ModuleNotFoundError: ",
    "return self.clinet": "AttributeError: 'Env' object has no attribute 'clinet'",
    "return text.stirp()": "AttributeError: 'str' object has no attribute 'stirp'",
    "return json.laods(text)": "AttributeError: module 'json' has no attribute 'laods'",
    "return query.name": "AttributeError: 'dict' object has no attribute 'name'",  # a model sends no objects of a class
    "return self.client.search(text)": "AttributeError: 'NoneType' object has no attribute 'search'",
    "return self._price()": "TypeError: Env._price() missing 1 required positional argument",
    "return self._price(text, 1)": "TypeError: Env._price() takes 2 positional arguments but 3 were given",
    "return self._price(name=text)": "TypeError: Env._price() got an unexpected keyword argument",
    "return self.prices('tea')": "TypeError: 'dict' object is not callable",
    "return os.environ['OF_NOBODY']": "KeyError: 'OF_NOBODY'. If this environment variable is set",
    "self._meets(NoNetworkError(NO_NETWORK))": "NoNetworkError: this code has no network",
    "self._meets(PermissionError(13, 'no', '/words'))": "PermissionError: [Errno 13] no: '/words'. This code reads",
    "try: txt\nexcept Exception as error: raise ValueError(f'failed: {error}')": "NameError: name 'txt'",
    "try: txt\nexcept Exception as error: raise ValueError('failed') from error": "NameError: name 'txt'",
    "try: import numpyy\nexcept ImportError as error: raise RuntimeError(str(error))": "ModuleNotFoundError: ",
    "exec(text, {'search': lambda: self.prices[txt]})": "NameError: name 'txt' is not defined",
}


@pytest.mark.parametrize("body", BROKEN)
@pytest.mark.parametrize("kind", ["", "async "])
def test_what_no_argument_causes_is_told_with_its_line(tmp_path: Path, body: str, kind: str) -> None:
    arguments: dict[str, Any] = {"text": "search()"} if "exec" in body else {}
    arguments |= {"query": {}} if "query" in body else {}
    ((is_broken, said),) = faults_of(tmp_path, body, arguments, kind=kind)
    assert is_broken
    assert re.match(r"\d+: ", said)
    assert said.partition(": ")[2].startswith(BROKEN[body])


def test_the_line_is_the_innermost_of_the_users_files(tmp_path: Path) -> None:
    assert faults_of(tmp_path, "\nreturn txt", {}) == [
        (True, f"{FIRST_LINE + 1}: NameError: name 'txt' is not defined")
    ]
    (tmp_path / "helper_of_a_tool.py").write_text("import json\ndef find(text):\n    return json.laods(text)\n")
    body = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport helper_of_a_tool\nhelper_of_a_tool.find(text)"
    ((_, said),) = faults_of(tmp_path, body, {})
    assert said.startswith(f"{tmp_path}/helper_of_a_tool.py:3: AttributeError")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("raise ValueError('that is not allowed')", {}),
        ("raise Refusal('game over')", {}),
        ("raise AttributeError('no such field')", {}),
        ("raise PermissionError('the door is locked')", {}),
        ("raise Unknown('no such thing')", {}),
        ("assert number > 3", {}),
        ("return int(text)", {}),
        ("return json.loads(text)", {}),
        ("return self.prices[text]", {"text": "coffee"}),
        ("return {5: 'tea'}[number]", {"number": 1}),
        ("return ['tea'][number]", {"number": 1}),
        ("return open(f'pages/{text}.txt')", {"text": "coffee"}),
        ("return table['tea']", {"table": {"milk": 1}}),
        ("return more[0]['price'] + 1", {"more": ["tea"]}),  # the schema leaves it open
        ("return text.strip()", {"text": None}),
        ("return number.bit_count()", {"number": "1"}),
        ("return self._price(*more)", {"more": [1, 2]}),
        ("return eval(text)", {"text": "unknown + 1"}),
        ("exec(text)", {"text": "import numpyy"}),
        ("exec(text)", {"text": "def f(): return [].foo\nf()"}),
        ("return getattr(math, text)(1)", {"text": "sine"}),
        ("importlib.import_module(text)", {"text": "numpyy"}),
        ("self._meets(PermissionError(13, 'no', '/etc/shadow'))", {"text": "../../etc/shadow"}),
        ("try: self.clinet\nexcept AttributeError: raise ValueError('not open')", {}),
        ("try: import numpyy\nexcept ImportError: return int(text)", {}),
        ("return text", {"txt": ""}),
    ],
)
def test_what_a_model_may_have_caused_is_its_to_read(tmp_path: Path, body: str, arguments: dict[str, Any]) -> None:
    assert faults_of(tmp_path, body, arguments) == []


@pytest.mark.parametrize(
    "body",
    [
        "return self.prices['tee']",
        "return 1 / 0",
        "return open('words.txt')",
        "raise RuntimeError('no index')",
        r"return re.search(r'\d', text).group()",
        "found = self.prices.get('milk')\nreturn found.name",
    ],
)
def test_what_may_be_either_is_no_proof(tmp_path: Path, body: str) -> None:
    ((is_broken, said),) = faults_of(tmp_path, body, {})
    assert not is_broken
    assert said.startswith(f"{FIRST_LINE + body.count(chr(10))}: ")


def test_arguments_are_made_that_fit_a_schema() -> None:
    def tool(
        text: str,
        count: int,
        share: float,
        flag: bool,
        how: Literal["fast", "slow"],
        size: Literal[1, 2],
        items: list[list[int]],
        pair: tuple[str, int],
        table: dict[str, float],
        either: int | str,
        some: str | None,
        deep: list[dict[str, bool]] | dict[str, int],
        nothing: int | None,
        left: int = 3,
    ) -> None:
        """Use.

        Args:
            text: A. (choices: ["x", "y"])
            count: B.
            share: C.
            flag: D.
            how: E.
            size: F.
            items: G.
            pair: H.
            table: I.
            either: J.
            some: K.
            deep: L.
            nothing: M.
            left: N.
        """  # fmt: skip

    schema = json_schema(tool)["function"]["parameters"]
    made = example(schema)
    assert made == {
        "text": "x", "count": 1, "share": 1.0, "flag": True, "how": "fast", "size": 1, "items": [[1]],
        "pair": ["example", 1], "table": {"example": 1.0}, "either": 1, "some": "example",
        "deep": [{"example": True}], "nothing": 1,
    }  # fmt: skip
    assert fits(schema, made)
    assert fits(schema, {**made, "share": 2, "some": None, "either": "a", "items": [], "left": 4})
    for wrong in (
        {"text": "z"}, {"count": True}, {"count": 1.0}, {"text": None}, {"items": [1]}, {"pair": ["a"]},
        {"table": {"a": "b"}}, {"deep": [{"a": 1}]}, {"more": 1}, {"either": [1]},
    ):  # fmt: skip
        assert not fits(schema, made | wrong), wrong
    assert not fits(schema, {"text": "x"})
