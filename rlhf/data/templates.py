"""Messages of a prompt or a whole conversation -> tokens: by the tokenizer's chat template, a named one, or plain text.

A chat template itself writes bos if its model needs it, so no special token is added to the rendered text. Plain text
(`raw`, `qa`) begins with bos if the tokenizer adds one to plain text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlhf.config.data import TemplateName
from rlhf.config.grpo import GRPOConfig
from rlhf.data.model_files import reward_template

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
PLAIN = ("raw", "qa")


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
    return chat_text(messages, template, tokenizer, "data.template", add_generation_prompt=True)


def reward_input(config: GRPOConfig) -> Callable[..., np.ndarray]:
    """(messages, tokenizer) -> `conversation_ids` in the template of the reward model, which is not an endpoint."""
    assert config.reward_model is not None
    return partial(conversation_ids, template=reward_template(config.reward_model), key="reward_model.template")


def conversation_ids(
    messages: Sequence[dict[str, str]], tokenizer: Any, *, template: TemplateName, key: str
) -> np.ndarray:
    """Token ids [L] int32 of a prompt and its response (the last message), as a reward model reads them.

    As plain text the response follows the prompt without anything between them, as in the policy's own sequence.

    Args:
        key: the template's key of the config, for error messages.

    Raises:
        ValueError: the model has no chat template, or its template refuses these messages.
    """
    if template in PLAIN:
        *prompt, response = messages
        text = render(prompt, template, tokenizer) + response["content"]
    else:
        text = chat_text(messages, template, tokenizer, key, add_generation_prompt=False)
    return tokenize([text], template, tokenizer)[0]


def no_chat_template(key: str) -> str:
    """The error message for a model without a chat template."""
    return (
        f"{key}=model: the model's tokenizer has no chat template. "
        f"Use one of {', '.join(CHAT_TEMPLATES)}, qa or raw, or a model that was trained to chat."
    )


def chat_text(
    messages: Sequence[dict[str, Any]],
    template: TemplateName,
    tokenizer: Any,
    key: str,
    *,
    add_generation_prompt: bool,
    tools: list[Any] | None = None,
) -> str:
    """A conversation as a chat template writes it; raises as `render` does."""
    with template_errors(messages, template, tokenizer, key):
        text: str = tokenizer.apply_chat_template(
            list(messages),
            chat_template=CHAT_TEMPLATES.get(template),
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            tokenize=False,
        )
    return text


@contextlib.contextmanager
def template_errors(
    messages: Sequence[dict[str, Any]], template: TemplateName, tokenizer: Any, key: str
) -> Iterator[None]:
    """A context in which a chat template may refuse these messages: a ValueError that names the key."""
    if template == "model" and not tokenizer.chat_template:
        raise ValueError(no_chat_template(key))
    from jinja2.exceptions import TemplateError

    try:
        yield
    except TemplateError as error:  # templates raise it for a role that their model does not have
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"{key}={template}: the chat template refuses messages with the roles {roles} ({error}). "
            "Unset data.system_prompt if the model knows no system role, or choose another template."
        ) from error


def tokenize(texts: Sequence[str], template: TemplateName, tokenizer: Any) -> list[np.ndarray]:
    """Token ids [P] int32 of every rendered prompt."""
    prefix = [tokenizer.bos_token_id] if template in PLAIN and _starts_plain_text_with_bos(tokenizer) else []
    token_ids = []
    for start in range(0, len(texts), ROWS_PER_BATCH):
        batch = list(texts[start : start + ROWS_PER_BATCH])
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        token_ids += [np.array(prefix + ids, dtype=np.int32) for ids in encoded["input_ids"]]
    return token_ids


def _starts_plain_text_with_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
