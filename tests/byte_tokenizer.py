"""A tokenizer whose tokens are the bytes of the text, made without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OWN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(
    chat_template: str = OWN_TEMPLATE, *, adds_bos: bool = False, merges: Sequence[tuple[str, str]] = ()
) -> Any:
    """A tokenizer of transformers.

    Args:
        merges: pairs of symbols that become one token; a space is \u0120.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from tokenizers.decoders import ByteLevel
    from transformers import PreTrainedTokenizerFast

    symbols = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    fast = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=list(merges)))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = ByteLevel()
    if adds_bos:
        fast.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer
