"""The schema of a tool is the one that transformers makes, key for key and in the same order."""

# ruff: noqa: UP006, UP007, UP035, UP045
from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Dict, List, Literal, Optional, Sequence, Tuple, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from rlhf.environments.schema import json_schema

HINTS = [
    int, float, str, bool, None, list, dict, tuple, Any, object, bytes, set, Exception,
    Optional[int], int | None, Union[int, str], int | str | None, list | tuple, Union[list, None], Any | None,
    Optional[Literal["a", "b"]], Literal["a"] | int, list[int] | int, list[int] | None, dict[str, int] | str,
    Literal["a", "b"], Literal[1, "b", None], Literal[True], Literal[1, 2],
    list[int], list[list[str]], list[Literal["x"]], List[int], List, list[Optional[int]],
    dict[str, int], dict[str, list[float]], Dict[str, Any], Dict, dict[str, dict[str, bool]],
    tuple[int, str], Tuple[int, str], Tuple, tuple[()], tuple[list[int], dict[str, int]],
]  # fmt: skip
REFUSED_HINTS = [tuple[int], tuple[int, ...], set[int], Sequence[int], Callable[[int], int], list[set[int]]]


def tool(hint: Any, *, default: Any = ..., returns: Any = ..., doc: str = "Do it.\n\nArgs:\n    x: What.\n") -> Any:
    if default is ...:

        def function(x): ...
    else:

        def function(x=default): ...

    function.__annotations__ = {"x": hint} | ({} if returns is ... else {"return": returns})
    function.__doc__ = doc
    return function


def same(function: Callable[..., Any]) -> None:
    assert json.dumps(json_schema(function)) == json.dumps(get_json_schema(function))


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_hints_have_the_schema_of_transformers(hint: Any) -> None:
    same(tool(hint))
    same(tool(hint, default=None))
    same(tool(int, returns=hint))


@pytest.mark.parametrize("hint", REFUSED_HINTS, ids=str)
def test_hints_that_transformers_refuses_are_refused(hint: Any) -> None:
    for function in (tool(hint), tool(int, returns=hint)):
        with pytest.raises(Exception, match=r"(?i)hint|tuple"):
            get_json_schema(function)
        with pytest.raises(ValueError, match="has no JSON schema"):
            json_schema(function)


def test_images_and_tensors_have_types_of_their_own() -> None:
    import torch
    from PIL.Image import Image

    same(tool(Image))
    same(tool(torch.Tensor, returns=list[torch.Tensor]))


DOCSTRINGS = [
    "Do it.\n\nArgs:\n    x: What\n        goes on here.\n\n    More of it.\n\nReturns:\n    The\n    result.\n",
    '\n    Do it.\n    In two lines.\n\n    Args:\n        x: What (choices: ["tea", " coffee "])\n    ',
    "Do it.\n\nArgs:\n    y: Other.\n    x: What. (Choices: [1, 2])\n    z: Third: with a colon\n\nRaises:\n    E: no.",
    "Args:\n    y: Not seen: nothing is before Args.\n\nArgs:\n    x: Seen.",
    "Do it. Args: in a line.\n\nArgs:\n    x: What.\n\nReturns:\n    y: Something.\n\nRaises:\n    E: not this",
    "Do it.\n\nArgs:\n    x:\n        On the next line.\n    y: Foo",
    "Do it.\n\nArgs:\n    Some words first.\n    x: What\nReturns:\n    It.",
    "Do it.\n\nArgs:\n    x: What. Raises: nothing\n",
    "Do it.\n\nArgs:\n    x: What (choices: [1]) after\n",
    "Returns:\n    It\n\nArgs:\n    x: What.",
]


@pytest.mark.parametrize("doc", DOCSTRINGS)
def test_docstrings_are_read_as_transformers_reads_them(doc: str) -> None:
    same(tool(str, doc=doc))
    same(tool(str, doc=doc, returns=int))


WORDS = st.sampled_from(
    [
        "Args:",
        "Returns:",
        "Raises:",
        "x:",
        "y:",
        "x (int):",
        "word",
        "\n",
        "\n    ",
        "\n\n",
        "  ",
        "(choices: [1])",
        ".",
    ]
)


@given(st.lists(WORDS, max_size=14))
def test_any_docstring_gives_the_same_schema_or_the_same_refusal(words: list[str]) -> None:
    function = tool(int, returns=str, doc=" ".join(words))
    try:
        expected = get_json_schema(function)
    except Exception:
        with pytest.raises(ValueError, match="docstring"):
            json_schema(function)
    else:
        assert json.dumps(json_schema(function)) == json.dumps(expected)


def test_bound_methods_and_functions_without_arguments() -> None:
    class Game:
        def move(self, to: str, times: int = 1) -> str:
            """Move.

            Args:
                to: Where.
                times: How often.
            """
            return to

        def look(self) -> None:
            """Look."""

    for function in (Game().move, Game().look, Game.move):
        same(function)


def test_what_is_missing_is_named() -> None:
    def undocumented(x: int) -> None: ...

    def untyped(x, y: int):
        """Do it.

        Args:
            x: One.
            y: Two.
        """

    def undescribed(x: int, y: int) -> None:
        """Do it.

        Args:
            x: One.
        """

    def open_ended(x: int, **rest) -> None:
        """Do it.

        Args:
            x: One.
        """

    expected = {
        undocumented: "no docstring",
        untyped: "x has no type hint",
        undescribed: "describe y",
        open_ended: "rest",
    }
    for function, reason in expected.items():
        with pytest.raises(Exception, match=function.__name__):
            get_json_schema(function)
        with pytest.raises(ValueError, match=f"{function.__name__}.*{reason}"):
            json_schema(function)
    with pytest.raises(json.JSONDecodeError):
        json_schema(tool(str, doc="Do it.\n\nArgs:\n    x: What (choices: tea)"))
