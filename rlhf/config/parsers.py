"""Which of vLLM's parsers read the tool calls and thoughts of a model, by the marks in its chat template.

vLLM itself is not imported: its names are read from its source, so that a wrong one is refused before anything starts.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import NamedTuple

from rlhf.config.vllm_source import vllm_source

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
REASONING_PARSERS = (
    (("<|channel>",), "gemma4"),
    (("<|start|>assistant", "<|channel|>"), "openai_gptoss"),
    (("<seed:think>",), "seed_oss"),
    (("[THINK]",), "mistral"),
    (("<think>", "<arg_key>"), "glm45"),
    (("<think>", "<minimax:tool_call>"), "minimax_m2"),
    (("<think>", "truncate_history_thinking"), "nemotron_v3"),
    (("<think>", "<tool_call>"), "qwen3"),
    (("<think>",), "deepseek_r1"),
)


class ParserNames(NamedTuple):
    """vLLM's names of the parsers of a model; None: its messages have no such part."""

    tools: str | None
    reasoning: str | None


def parsers_of(template: str, tool_parser: str, *, calls_tools: bool = True) -> ParserNames:
    """The parsers of a model with this chat template, which is the text of the Jinja template.

    Args:
        tool_parser: rollout.tool_parser: a name, or `auto` to choose by the template.
        calls_tools: False where the model has no tools, so that no parser has to be found for them.

    Raises:
        ValueError: the name is unknown, or `auto` knows no mark of a tool call in the template.
    """
    check_tool_parser(tool_parser)
    tools = tool_parser if tool_parser != "auto" else _by_marks(template, TOOL_PARSERS)
    if calls_tools and tools is None:
        raise ValueError(
            "rollout.tool_parser=auto: the chat template shows no form of tool calls that is known here. Use the "
            "template of a model that calls tools (data.template takes a file), or name the parser that reads the "
            f"calls, one of {', '.join(vllm_parsers())}."
        )
    return ParserNames(tools if calls_tools else None, _by_marks(template, REASONING_PARSERS))


def check_tool_parser(name: str) -> None:
    """Raise ValueError if vLLM has no tool parser of this name; where vLLM is not installed, every name passes."""
    if name != "auto" and (known := vllm_parsers()) and name not in known:
        raise ValueError(
            f"rollout.tool_parser={name}: vLLM has no such parser. Use auto, which chooses by the chat template, "
            f"or one of {', '.join(known)}."
        )


@cache
def vllm_parsers() -> tuple[str, ...]:
    """The names of vLLM's tool parsers, in order; () if vLLM is not installed."""
    for node in vllm_source("tool_parsers/__init__.py"):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return tuple(sorted(ast.literal_eval(node.value)))
    return ()


def _by_marks(template: str, parsers: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    return next((name for marks, name in parsers if all(mark in template for mark in marks)), None)
