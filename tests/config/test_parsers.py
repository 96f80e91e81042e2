"""Which of vLLM's parsers a chat template gets, and names that vLLM does not have."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlhf.config.parsers import TOOL_PARSERS, tool_parser_of, vllm_parsers
from rlhf.config.sections import RolloutConfig

HERMES = "{{ '<tool_call>\\n{\"name\": \"' + call.name + '\"}\\n</tool_call>' }}"


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        (HERMES, "hermes"),
        ("<think>" + HERMES, "hermes"),
        ("<think><tool_call>\n<function={{ name }}>\n<parameter=", "qwen3_coder"),
        ("<|channel>thought<|tool_call>call:{{ name }}<tool_call|>", "gemma4"),
        ("<tool_call>{{ name }}\n<arg_key><think>", "glm45"),
        ('{"name": "{{ name }}", "parameters": {{ arguments }}} ipython', "llama3_json"),
        ("<think></think><｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|start|>assistant to=functions.x<|channel|>commentary", "openai"),
    ],
)
def test_marks_in_the_template_choose_the_parser(template: str, tools: str) -> None:
    assert tool_parser_of(template, "auto") == tools
    assert tool_parser_of(template, "pythonic") == "pythonic"


def test_a_template_without_a_known_form_of_calls_is_refused_with_the_names_where_tools_are_called() -> None:
    template = "{{ message.content }}"
    with pytest.raises(ValueError, match=r"(?s)^rollout\.tool_parser=auto: .*data\.template.* hermes,.* pythonic"):
        tool_parser_of(template, "auto")
    assert tool_parser_of(template, "hermes") == "hermes"


def test_an_unknown_parser_is_refused_when_the_config_is_read() -> None:
    with pytest.raises(ValueError, match=r"(?s)rollout\.tool_parser=hermez: vLLM has no such parser\. .* hermes, "):
        RolloutConfig(prompts_per_step=1, samples_per_prompt=2, max_response_tokens=8, tool_parser="hermez")


def test_the_names_of_the_table_are_vllms_and_are_read_without_importing_it() -> None:
    assert {name for _, name in TOOL_PARSERS} <= set(vllm_parsers())
    code = "import sys; from rlhf.config.parsers import vllm_parsers; print(len(vllm_parsers()), 'vllm' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, imported = result.stdout.split()
    assert (int(count), imported) == (len(vllm_parsers()), "False")


@pytest.mark.slow
def test_the_names_of_the_table_can_be_loaded() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert sorted(ToolParserManager.lazy_parsers) == list(vllm_parsers())
