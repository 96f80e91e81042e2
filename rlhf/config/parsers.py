"""Which of vLLM's parsers reads the tool calls of a model, by the marks in its chat template.

vLLM itself is not imported: its names are read from its source, so that a wrong one is refused before anything starts.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

# The first row whose marks are all in the template. A more special form stands before the more general one.
TOOL_PARSERS = (
    (("<arg_key>",), "glm45"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|start|>assistant", "<|channel|>commentary"), "openai"),
    (("<function_calls>",), "olmo3"),
    (('{"name": ', '"parameters": ', "ipython"), "llama3_json"),
    (("<tool_call>",), "hermes"),
)


def tool_parser_of(template: str, tool_parser: str) -> str:
    """`tool_parser`, or if that is `auto`, the parser for a model with this chat template (the Jinja text).

    Raises:
        ValueError: the name is unknown, or `auto` knows no mark of a tool call in the template.
    """
    if check_tool_parser(tool_parser) != "auto":
        return tool_parser
    name = next((name for marks, name in TOOL_PARSERS if all(mark in template for mark in marks)), None)
    if name is None:
        raise ValueError(
            "rollout.tool_parser=auto: the chat template has no known form of tool calls. Use the template of a model "
            f"that calls tools (data.template takes a file), or name a parser: {', '.join(vllm_parsers())}."
        )
    return name


def check_tool_parser(name: str) -> str:
    """Return the name. Raise ValueError if vLLM has no such tool parser; every name passes if it is not installed."""
    if name != "auto" and (known := vllm_parsers()) and name not in known:
        raise ValueError(f"rollout.tool_parser={name}: vLLM has no such parser. Use auto or one of {', '.join(known)}.")
    return name


@cache
def vllm_parsers() -> tuple[str, ...]:
    """The sorted names of vLLM's tool parsers. Empty if vLLM is not installed."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return ()
    source = (Path(package.origin).parent / "tool_parsers/__init__.py").read_text()
    tables = (node.value for node in ast.parse(source).body if isinstance(node, ast.Assign))
    names = [tuple(sorted(ast.literal_eval(table))) for table in tables if isinstance(table, ast.Dict)]
    return names[0] if names else ()
