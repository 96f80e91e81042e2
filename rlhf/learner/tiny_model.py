"""The quickstart's model and tokenizer: so small that two CPU cores train it, in the formats of real ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

CONTEXT_TOKENS = 2048
# Few positions matter here: with 10,000, as in Qwen2, the warm-up finds the digits later, and takes twice as long.
ROPE_THETA = 100.0
INITIAL_WEIGHT_STD = 0.05  # measured: the warm-up converges sooner than from the 0.02 of full-size models
END_TOKEN, PAD_TOKEN = "<|end|>", "<|pad|>"
ROLE_TOKENS, TOOL_ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>"), ("<|tools|>", "<|tool|>")
BOX_TOKEN = "\\boxed{"  # one token, so that an answer costs its digits and not eight bytes of markup
# The fixed text around the expression is two tokens, so that a call costs its digits and not eighty bytes of JSON.
CALL_TOKENS = ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>')
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
# `<|tools|>` names the tools, and a call has the form of Hermes and Qwen, which vLLM's parser `hermes` reads.
TOOL_CHAT_TEMPLATE = (
    "{%- if tools -%}<|tools|>{{- tools | map(attribute='function.name') | join(' ') -}}<|end|>{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    """{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}"""
    "{{- call.function.arguments | tojson + '}\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_tokenizer(*, tools: bool = False) -> Qwen2Tokenizer:
    """A byte-level tokenizer (256 bytes, a few markers) with a chat template; it encodes any text, after NFC.

    `tools`: the template also writes tools, calls and their answers.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    # AutoTokenizer loads a Qwen2Tokenizer for every model of this type, so the tokenizer is one from the start.
    tokenizer = Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # every byte is known; the default would add a token
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        extra_special_tokens=[*ROLE_TOKENS, *(TOOL_ROLE_TOKENS if tools else ())],
        chat_template=TOOL_CHAT_TEMPLATE if tools else CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    texts = (BOX_TOKEN, *(CALL_TOKENS if tools else ()))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    return tokenizer


def make_model(
    *, hidden_size: int = 128, num_layers: int = 3, num_heads: int = 4, tools: bool = False, seed: int = 0
) -> Qwen2ForCausalLM:
    """An untrained float32 Qwen2 for the vocabulary of `make_tokenizer`; vLLM on CPU needs heads of 32 or more."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer(tools=tools)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=INITIAL_WEIGHT_STD,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


def save_model(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder; the model's own `save_pretrained` would import DeepSpeed."""
    from rlhf.learner.hub_format import model_tensors, write_model, write_model_config

    tensors = model_tensors(model)
    write_model(folder, model, tensors, tensors.items())
    write_model_config(folder, model)
    tokenizer.save_pretrained(folder)
