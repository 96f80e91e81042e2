"""Suffixes of conversations in templates of TRL, against TRL's own suffixes and against those of `renderers`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer

from rlhf.data.dialogue import Dialogue

pytestmark = pytest.mark.slow

trl = pytest.importorskip("trl", reason="comes with the extra bench")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "One."}},
                "required": ["a"],
            },
        },
    }
]
QUESTION = {"role": "user", "content": "1+2?"}
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", *VISION]
LLAMA = ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|end_of_text|>"]
GEMMA = [
    "<eos>", "<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>", "<|image>", "<image|>", "<|image|>",
]  # fmt: skip
GLM = ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"]
GLM += ["/nothink", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
TEXT = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
THOUGHT = "hm\n</think>\n\n"
# special tokens, the first of them eos; ids that end a response; a turn with a call, and one with an answer
FAMILIES: dict[str, tuple[list[str], list[str], str, str]] = {
    "qwen2_5": (QWEN, ["<|im_end|>", "<|endoftext|>"],
                '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>', "Three.<|im_end|>"),
    "qwen3_5_think": (QWEN, ["<|im_end|>", "<|endoftext|>"],
                      THOUGHT + "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
                      "<|im_end|>", THOUGHT + "Three.<|im_end|>"),
    "llama3_1": (LLAMA, ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
                 '{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "Three.<|eot_id|>"),
    "gemma4": (GEMMA, ["<eos>", "<turn|>", "<|tool_response>"],
               "<|tool_call>call:add{a:1}<tool_call|><|tool_response>", "Three.<turn|>"),
    "glm4moe": (GLM, ["<|endoftext|>", "<|user|>", "<|observation|>"],
                "<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
                "<|observation|>", "<think></think>\nThree.<|user|>"),
}  # fmt: skip
ANSWERS = [
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "tool", "name": "add", "content": " four\n\n{'error': \"no\"} é"},
]
FORGETFUL = ("qwen3_5_think", "gemma4", "glm4moe")  # of thoughts
NEW = {"one answer": ANSWERS[:1], "two answers": ANSWERS, "the user": [{"role": "user", "content": "Sure?"}]}


def make(name: str) -> tuple[Any, Dialogue]:
    special, stops, *_ = FAMILIES[name]
    template = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    tokenizer = byte_tokenizer(template.read_text())
    tokenizer.add_special_tokens({"eos_token": special[0], "additional_special_tokens": special[1:]})
    tokenizer.add_tokens(TEXT)
    return tokenizer, Dialogue(tokenizer, stop_ids=tokenizer.convert_tokens_to_ids(stops))


@pytest.mark.parametrize("name", FAMILIES)
def test_suffixes_of_trls_templates_are_append_only(name: str) -> None:
    _, dialogue = make(name)
    for tools in (TOOLS, None):
        # a template that drops the thoughts of earlier turns is said to do so: what was sampled stays as it was
        said = dialogue.check(tools)
        assert ["(it drops their thoughts)" in line for line in said] == [True] * (name in FORGETFUL)


@pytest.mark.parametrize("kind", ["one answer", "two answers"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "glm4moe"])  # theirs repeats <|observation|>
def test_suffixes_are_those_of_trls_trainer(name: str, kind: str) -> None:
    from trl import GRPOTrainer

    tokenizer, dialogue = make(name)
    trainer = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, chat_template=None, chat_template_kwargs={}, _is_vlm=False
    )
    theirs = GRPOTrainer._get_tool_suffix_ids(trainer, NEW[kind])
    assert dialogue.suffix(NEW[kind], TOOLS).tolist() == list(theirs)


def renderer(name: str, tokenizer: Any) -> Any:
    renderers = pytest.importorskip("renderers", reason="comes with the extra bench")
    from renderers import configs
    from renderers.gemma4 import Gemma4Renderer
    from renderers.glm45 import GLM45Renderer
    from renderers.llama_3 import Llama3Renderer
    from renderers.qwen35 import Qwen35Renderer

    assert renderers
    match name:
        case "qwen3_5_think":
            keep = configs.Qwen35RendererConfig(enable_thinking=True, thinking_retention="all")
            return Qwen35Renderer(tokenizer, keep)
        case "llama3_1":
            return Llama3Renderer(tokenizer)
        case "glm4moe":
            return GLM45Renderer(tokenizer, configs.GLM45RendererConfig(thinking_retention="all"))
        case "gemma4":
            return Gemma4Renderer(tokenizer)
    raise AssertionError(name)


@pytest.mark.parametrize("kind", NEW)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen2_5"])
def test_suffixes_are_those_of_renderers_which_lacks_qwen2_5(name: str, kind: str) -> None:
    tokenizer, dialogue = make(name)
    _, _, calling, answering = FAMILIES[name]
    turn = tokenizer(answering if kind == "the user" else calling, add_special_tokens=False)["input_ids"]
    prompt = dialogue.prompt([QUESTION], TOOLS).tolist()
    theirs = renderer(name, tokenizer).bridge_to_next_turn(prompt, turn, NEW[kind], tools=TOOLS)
    ours = dialogue.suffix(NEW[kind], TOOLS, after=turn[-1]).tolist()
    assert tokenizer.decode(prompt + turn + ours) == tokenizer.decode(theirs.token_ids)
    assert prompt + turn + ours == list(theirs.token_ids)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
def test_a_suffix_after_another_stop_token_is_that_of_renderers(name: str) -> None:
    """Qwen's <|endoftext|> and Llama's <|eom_id|> close a turn as well; renderers knows it of Llama alone."""
    tokenizer, dialogue = make(name)
    other = tokenizer.convert_tokens_to_ids(FAMILIES[name][1][1])
    ours = dialogue.suffix(ANSWERS, TOOLS, after=other).tolist()
    assert ours == dialogue.suffix(ANSWERS, TOOLS).tolist()
    if name == "llama3_1":
        turn = [*tokenizer("Three.")["input_ids"], other]
        theirs = renderer(name, tokenizer).bridge_to_next_turn([1], turn, ANSWERS, tools=TOOLS)
        assert ours == list(theirs.token_ids)[1 + len(turn) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_in_an_answer_stay_text_in_trls_templates(name: str) -> None:
    tokenizer, dialogue = make(name)
    hostile = "".join([*FAMILIES[name][0], *TEXT])
    harmless, ids = (
        dialogue.suffix([{"role": "tool", "name": "add", "content": content}], TOOLS).tolist()
        for content in ("3", f"3{hostile}4")
    )
    written = f"3{hostile}4" if name != "llama3_1" else f"3{hostile}4".replace('"', '\\"')
    assert written in tokenizer.decode(ids)
    control = tokenizer.added_tokens_decoder
    assert [each for each in ids if each in control] == [each for each in harmless if each in control]
