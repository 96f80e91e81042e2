"""An exception of a tool: the tool is broken, or may be, or has only answered the call."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

import pytest

from rlhf.environments.contract import Environment
from rlhf.environments.schema import example, json_schema

CLASS = '''import importlib, json, math, os, re

from rlhf.processes.confinement import NO_NETWORK, NoNetworkError

class Env:
    def reset(self, **row): self.prices, self.client = {"tea": 3}, None
    def _price(self, item): return self.prices[item]
    def _meets(self, error): (one for one in ()).throw(error)  # as a library does

    %sdef use(self, text: str) -> str:
        """Use.

        Args:
            text: Text.
        """
%s
'''
FIRST_LINE = 16  # of the body


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
    "return self.clinet": "AttributeError: 'Env' object has no attribute 'clinet'",
    "return json.laods(text)": "AttributeError: module 'json' has no attribute 'laods'",
    "return os.environ['OF_NOBODY']": "KeyError: 'OF_NOBODY'. If this environment variable is set",
    "self._meets(NoNetworkError(NO_NETWORK))": "NoNetworkError: this code has no network",
    "self._meets(PermissionError(13, 'no', '/words'))": "PermissionError: [Errno 13] no: '/words'. This code reads",
    "exec(text, {'search': lambda: self.prices[txt]})": "NameError: name 'txt' is not defined",
}


@pytest.mark.parametrize("body", BROKEN)
@pytest.mark.parametrize("kind", ["", "async "])
def test_a_tool_that_no_argument_breaks_is_told_with_its_line(tmp_path: Path, body: str, kind: str) -> None:
    ((is_broken, said),) = faults_of(tmp_path, body, {"text": "search()"} if "exec" in body else {}, kind=kind)
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
        ("return int(text)", {}),
        ("return self.prices[text]", {"text": "coffee"}),
        ("return open(f'pages/{text}.txt')", {"text": "coffee"}),
        ("return eval(text)", {"text": "unknown + 1"}),
        ("exec(text)", {"text": "import numpyy"}),
        ("exec(text)", {"text": "def f(): return [].foo\nf()"}),
        ("return getattr(math, text)(1)", {"text": "sine"}),
        ("importlib.import_module(text)", {"text": "numpyy"}),
        ("self._meets(PermissionError(13, 'no', '/etc/shadow'))", {"text": "../../etc/shadow"}),
        ("return text", {"txt": ""}),
    ],
)
def test_an_error_about_the_call_is_the_models_to_read(tmp_path: Path, body: str, arguments: dict[str, Any]) -> None:
    assert faults_of(tmp_path, body, arguments) == []


@pytest.mark.parametrize(
    "body",
    [
        "return self.prices['tee']",
        "return open('words.txt')",
        "raise RuntimeError('no index')",
        "raise AttributeError('no such field')",
        "return text.stirp()",
        "return self.client.search(text)",
        "return self._price()",
    ],
)
def test_an_error_that_an_argument_may_cause_is_no_proof(tmp_path: Path, body: str) -> None:
    ((is_broken, said),) = faults_of(tmp_path, body, {})
    assert not is_broken
    assert said.startswith(f"{FIRST_LINE}: ")


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

    assert example(json_schema(tool)["function"]["parameters"]) == {
        "text": "x", "count": 1, "share": 1.0, "flag": True, "how": "fast", "size": 1, "items": [[1]],
        "pair": ["example", 1], "table": {"example": 1.0}, "either": 1, "some": "example",
        "deep": [{"example": True}], "nothing": 1,
    }  # fmt: skip
