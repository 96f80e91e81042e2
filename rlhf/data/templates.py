"""Messages -> prompt tokens: the tokenizer's own chat template, a named one, or plain text.

A chat template itself writes bos if its model needs it, so no special token is added to the rendered text. Plain text
(`raw`, `qa`) begins with bos if the tokenizer adds one to plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf.config.data import TemplateName

ROLES = ("system", "user", "assistant")
ROWS_PER_BATCH = 1024  # keeps the tokenizer's threads busy with little memory

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_MATH = (
    "{% if messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "{% endif %}" + CHATML
)
TULU = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}"  # a bare newline would be trimmed
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CHAT_TEMPLATES = {"chatml": CHATML, "qwen-math": QWEN_MATH, "tulu": TULU}


def render(messages: Sequence[dict[str, str]], template: TemplateName, tokenizer: Any) -> str:
    """The text of a prompt, up to the start of the response.

    `raw` joins the contents of the messages with blank lines; `qa` marks user messages as questions and assistant
    messages as answers.

    Raises:
        ValueError: the model has no chat template, or its template refuses these messages.
    """
    match template:
        case "raw":
            return "\n\n".join(message["content"] for message in messages)
        case "qa":
            names = {"system": "", "user": "Question: ", "assistant": "Answer: "}
            return "".join(f"{names[message['role']]}{message['content']}\n" for message in messages) + "Answer:"
        case "model" if not tokenizer.chat_template:
            raise ValueError(
                "data.template=model: the model's tokenizer has no chat template. "
                f"Use one of {', '.join(CHAT_TEMPLATES)}, qa or raw, or a model that was trained to chat."
            )
    from jinja2.exceptions import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(messages), chat_template=CHAT_TEMPLATES.get(template), add_generation_prompt=True, tokenize=False
        )
    except TemplateError as error:  # templates raise it for a role that their model does not have
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"data.template={template}: the chat template refuses messages with the roles {roles} ({error}). "
            "Unset data.system_prompt if the model knows no system role, or choose another template."
        ) from error


def tokenize(texts: Sequence[str], template: TemplateName, tokenizer: Any) -> list[np.ndarray]:
    """Token ids [P] int32 of every rendered prompt."""
    prefix = [tokenizer.bos_token_id] if template in ("raw", "qa") and _starts_plain_text_with_bos(tokenizer) else []
    token_ids = []
    for start in range(0, len(texts), ROWS_PER_BATCH):
        batch = list(texts[start : start + ROWS_PER_BATCH])
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        token_ids += [np.array(prefix + ids, dtype=np.int32) for ids in encoded["input_ids"]]
    return token_ids


def _starts_plain_text_with_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
