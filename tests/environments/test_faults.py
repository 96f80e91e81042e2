"""The user is warned of exceptions of a tool that its call may not have caused."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from rlhf.environments.contract import Environment
from rlhf.environments.faults import fault_of

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


def faults_of(tmp_path: Path, body: str, arguments: dict[str, Any], *, kind: str = "") -> list[str]:
    """The faults of a tool with this body: `line: Type: text`; none for an error that is the model's to read."""
    file = tmp_path / f"tool{len(list(tmp_path.iterdir()))}.py"
    file.write_text(CLASS % (kind, indent(body, 8 * " ")))

    async def rollout() -> dict[str, Any]:
        episode = Environment(f"{file}:Env").episode()
        await episode.reset({})
        return await episode.call([{"function": {"name": "use", "arguments": json.dumps({"text": "tea"} | arguments)}}])

    said = asyncio.run(rollout())
    assert said["errors"] == 1
    return [fault.removeprefix("use: ").replace(f"{file}:", "") for fault in said["faults"]]


FAULTS = {
    "return self.prices[txt]": "NameError: name 'txt' is not defined",
    "print(found); found = 1": "UnboundLocalError: ",
    "import numpyy": "ModuleNotFoundError: No module named 'numpyy'",
    "from os import nothing": "ImportError: cannot import name 'nothing'",
    "return self.clinet": "AttributeError: 'Env' object has no attribute 'clinet'",
    "return json.laods(text)": "AttributeError: module 'json' has no attribute 'laods'",
    "return self.prices['tee']": "KeyError: 'tee'",
    "return open('words.txt')": "FileNotFoundError: ",
    "raise RuntimeError('no index')": "RuntimeError: no index",
    "return self._price()": "TypeError: Env._price() missing 1 required positional argument",
    "return os.environ['OF_NOBODY']": "KeyError: 'OF_NOBODY'. If this environment variable is set",
    "self._meets(NoNetworkError(NO_NETWORK))": "NoNetworkError: this code has no network",
    "self._meets(PermissionError(13, 'no', '/words'))": "PermissionError: [Errno 13] no: '/words'. This code reads",
    "try: txt\nexcept Exception as error: raise ValueError(f'failed: {error}')": "NameError: name 'txt'",
    "try: txt\nexcept Exception as error: raise ValueError('failed') from error": "NameError: name 'txt'",
    "try: import numpyy\nexcept ImportError as error: raise ValueError(str(error))": "ModuleNotFoundError: ",
    "exec(text, {'search': lambda: self.prices[txt]})": "NameError: name 'txt' is not defined",
    "return the_text + teas": "NameError: name 'the_text' is not defined",
    "from os import a_tea": "ImportError: cannot import name 'a_tea'",
    "try: txt\nexcept NameError as error: raise ExceptionGroup('failed', [error])": "NameError: name 'txt'",
}


@pytest.mark.parametrize("body", FAULTS)
@pytest.mark.parametrize("kind", ["", "async "])
def test_an_error_that_the_call_may_not_have_caused_is_told_with_its_line(tmp_path: Path, body: str, kind: str) -> None:
    (fault,) = faults_of(tmp_path, body, {"text": "search()"} if "exec" in body else {}, kind=kind)
    assert re.match(r"\d+: ", fault)
    assert fault.partition(": ")[2].startswith(FAULTS[body])


def test_the_line_is_the_innermost_of_the_users_files(tmp_path: Path) -> None:
    assert faults_of(tmp_path, "\nreturn txt", {}) == [f"{FIRST_LINE + 1}: NameError: name 'txt' is not defined"]
    (tmp_path / "helper_of_a_tool.py").write_text("import json\ndef find(text):\n    return json.laods(text)\n")
    body = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport helper_of_a_tool\nhelper_of_a_tool.find(text)"
    (fault,) = faults_of(tmp_path, body, {})
    assert fault.startswith(f"{tmp_path}/helper_of_a_tool.py:3: AttributeError")


@pytest.mark.parametrize(("values", "key"), [({}, 7), ({}, "a"), ([], 7)])
def test_a_key_or_index_of_the_call_is_the_models_to_read(values: Any, key: Any) -> None:
    with pytest.raises(LookupError) as caught:
        values[key]
    assert fault_of(caught.value, {"key": key}) is None
    assert fault_of(caught.value, {"key": "other"}) is not None


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
        ("try: import numpyy\nexcept ImportError: return int(text)", {}),
        ("return text", {"txt": ""}),
    ],
)
def test_an_error_about_the_call_is_the_models_to_read(tmp_path: Path, body: str, arguments: dict[str, Any]) -> None:
    assert faults_of(tmp_path, body, arguments) == []
