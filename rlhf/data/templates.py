"""Renders and tokenizes messages: by the tokenizer's chat template, a named template, or as plain text.

A chat template writes bos itself if its model needs it, so no special token is added to the rendered text. Plain text
(`raw`, `qa`) begins with bos if the tokenizer adds one to plain text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.answers.thoughts import Marks, marks_in
from rlhf.config.base import file_problem
from rlhf.config.data import PLAIN, TemplateName, is_template_file
from rlhf.config.grpo import GRPOConfig
from rlhf.config.limit import limited
from rlhf.config.printing import as_utf8
from rlhf.data.control_tokens import MARK, control_tokens, split, without_marks
from rlhf.data.forms import (
    MAX_STRUCTURES,
    Conversation,
    Form,
    dropped_notes,
    find_form,
    missing_texts,
    missing_texts_message,
)
from rlhf.data.model_files import reward_template
from rlhf.types import Prompt

STAND_IN = "Zq0x"  # in place of the assistant's text, to find what a template writes around it
MAX_TEXT = 2**26  # characters of a rendered conversation; no real row has as many
MAX_SOURCE_BYTES = 2**22  # largest template file; the longest of a published model has 50 kB
TOKENS_SHOWN = 8  # from the first difference of two sequences on
ROWS_PER_BATCH = 1024  # enough to keep the tokenizer's threads busy

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


def render(
    messages: Sequence[dict[str, Any]],
    template: TemplateName,
    tokenizer: Any,
    *,
    tools: Any = None,
    arguments: Mapping[str, Any] | None = None,
    notes: Counter[str] | None = None,
) -> str:
    """The text of a prompt, up to the start of the response, for `tokenize`; it may have marks of `control_tokens`.

    `raw` joins the contents of the messages with blank lines; `qa` marks user messages as questions and assistant
    messages as answers; both know no tools. Raises as `render_whole` does.

    Args:
        arguments: further arguments of a chat template (`DataConfig.template_arguments`).
        notes: counts parts of messages that the template does not write.
    """
    options = {"tools": tools, "add_generation_prompt": True, **(arguments or {})}
    return render_whole(messages, template, tokenizer, "data.template", options, notes=notes)


def render_whole(
    messages: Sequence[dict[str, Any]],
    template: TemplateName,
    tokenizer: Any,
    key: str,
    options: Mapping[str, Any],
    *,
    strict: Collection[int] = (),
    checked: bool = True,
    notes: Counter[str] | None = None,
) -> str:
    """The text of a conversation, in the form in which the template writes all of it.

    Args:
        strict: indices of messages whose thoughts must be written. The template may drop other thoughts.
        options: arguments of `apply_chat_template`, such as `tools`, with those of the user's template.
        checked: search the texts of this conversation in the result; False checks only its structure.

    Raises:
        ValueError: there is no template, or it refuses the messages or leaves out a part of them.
    """
    said = conversation(messages, template, tokenizer, options.get("tools"))
    form = form_for(said, template, tokenizer, key, options, strict=strict)
    text = render_in_form(form, messages, template, tokenizer, key, options)
    if notes is not None:
        notes.update(dropped_notes(messages, form, "" if template in PLAIN else template_source(template, tokenizer)))
    if checked:
        check_whole(said, text, form, f"{key}={template}", strict)
    return text


def conversation(
    messages: Sequence[dict[str, Any]], template: TemplateName, tokenizer: Any, tools: Any
) -> Conversation:
    return Conversation(messages, tools, template_marks(template, tokenizer))


def template_marks(template: TemplateName, tokenizer: Any) -> Marks:
    """The marks of thoughts in the source of a template."""
    return _marks_in(template_source(template, tokenizer))


_marks_in = lru_cache(marks_in)


def form_for(
    said: Conversation,
    template: TemplateName,
    tokenizer: Any,
    key: str,
    options: Mapping[str, Any],
    *,
    strict: Collection[int] = (),
) -> Form:
    """The form in which a template writes such a conversation completely, cached; ValueError if there is none."""
    source = template_source(template, tokenizer)
    known = _known_forms(tokenizer, source)
    others = {name: value for name, value in options.items() if name != "tools"}
    given = json.dumps(others, sort_keys=True, default=lambda each: type(each).__name__)
    named = f"{template} {sorted(strict)} {given} {said.key}"
    structure = hashlib.blake2b(named.encode(), digest_size=16).digest()
    if structure not in known:
        if len(known) >= MAX_STRUCTURES:
            known.clear()

        def written(messages: list[dict[str, Any]], tools: Any) -> str:
            return render_in_form(None, messages, template, tokenizer, key, {**options, "tools": tools})

        try:
            known[structure] = find_form(said, source, template_marks(template, tokenizer), written, strict)
        except ValueError as error:
            known[structure] = str(error).removeprefix(f"{key}={template}: ")
    form = known[structure]
    if isinstance(form, str):
        raise ValueError(f"{key}={template}: {form}")
    return form


@lru_cache(maxsize=16)
def _known_forms(_tokenizer: Any, _source: str) -> dict[bytes, Form | str]:
    """Structure of a conversation -> its form, or the reason why there is none."""
    return {}


def render_in_form(
    form: Form | None,
    messages: Sequence[dict[str, Any]],
    template: TemplateName,
    tokenizer: Any,
    key: str,
    options: Mapping[str, Any],
) -> str:
    """The text of messages in a form; None: the messages already have it.

    `keep_assistant` in options: see `safe_messages`.
    """
    match template:
        case "raw":
            return "\n\n".join(message["content"] for message in messages)
        case "qa":
            names = {"system": "", "user": "Question: ", "assistant": "Answer: "}
            if unknown := {message["role"] for message in messages} - names.keys():
                raise ValueError(f"{key}=qa knows no message of {', '.join(unknown)}. Name a chat template.")
            return "".join(f"{names[message['role']]}{message['content']}\n" for message in messages) + "Answer:"
    passed = {**options, "tools": safe_tools(options.get("tools"), template, tokenizer)}
    given = template_messages(form, messages, template, tokenizer, keep_assistant=passed.pop("keep_assistant", False))
    text: str = apply_template(given, template, tokenizer, key, passed)
    return text


def template_messages(
    form: Form | None,
    messages: Sequence[dict[str, Any]],
    template: TemplateName,
    tokenizer: Any,
    *,
    keep_assistant: bool = False,
) -> list[dict[str, Any]]:
    """Messages for a chat template: in its form, and with control tokens in their contents as text."""
    given = list(messages) if form is None else form.messages(messages, template_marks(template, tokenizer))
    return safe_messages(given, template, tokenizer, keep_assistant=keep_assistant)


def check_whole(said: Conversation, text: str, form: Form, where: str, strict: Collection[int] = ()) -> None:
    """Raise a ValueError if a text of the conversation is missing in the rendered text."""
    if lost := missing_texts(said, without_marks(text) if MARK in text else text, form, strict):
        raise ValueError(f"{where}: {missing_texts_message(lost)}")


def safe_messages(
    messages: Sequence[dict[str, Any]], template: TemplateName, tokenizer: Any, *, keep_assistant: bool = False
) -> list[dict[str, Any]]:
    """The messages with control tokens in their contents as text (see `control_tokens`).

    The assistant's may contain marks of thoughts and calls, which are not special tokens. `keep_assistant`: they stay
    unchanged, since the model is to learn them.
    """
    control = control_tokens(tokenizer, template_source(template, tokenizer))

    def safe(message: dict[str, Any]) -> dict[str, Any]:
        assistant = message["role"] == "assistant"
        if assistant and keep_assistant:
            return message
        return {**control.as_text(message, special_only=assistant), "role": message["role"]}

    return [safe(message) for message in messages]


def safe_tools(tools: Any, template: TemplateName, tokenizer: Any) -> Any:
    """The tool schemas with control tokens as text."""
    return control_tokens(tokenizer, template_source(template, tokenizer)).as_text(tools) if tools else None


def template_source(template: TemplateName, tokenizer: Any) -> str:
    """The source of a chat template; if a tokenizer has several, all of them joined."""
    source = chat_template(template) or tokenizer.chat_template or ""
    return source if isinstance(source, str) else "".join(source.values())


def reads_date(template: TemplateName, tokenizer: Any) -> bool:
    """True if a template writes today's date, which `data.date` replaces."""
    return template not in PLAIN and "strftime_now" in template_source(template, tokenizer)


def unread_arguments(arguments: Mapping[str, Any], template: TemplateName, tokenizer: Any) -> Iterator[str]:
    """Notes about arguments of a row that the template does not read, as `forms.dropped_notes`."""
    source = "" if template in PLAIN else template_source(template, tokenizer)
    yield from (
        f"`chat_template_kwargs` has `{name}`, which the template does not read"
        for name, value in arguments.items()
        if value and name != "strftime_now" and name not in source
    )


def chat_template(template: TemplateName) -> str | None:
    """The source of a named template or of a file, None for the tokenizer's own; ValueError for a bad file."""
    if not is_template_file(template):
        return CHAT_TEMPLATES.get(template)
    try:
        return _read_template(Path(template).absolute())
    except (OSError, ValueError) as error:
        raise ValueError(f"data.template={template}: the file cannot be read ({error}). Correct the path.") from None


@lru_cache
def _read_template(path: Path) -> str:
    if problem := file_problem(path):
        raise ValueError(problem)
    if (size := path.stat().st_size) > MAX_SOURCE_BYTES:
        raise ValueError(f"it has {size:,} bytes, but a template may have at most {MAX_SOURCE_BYTES:,}")
    return path.read_text(encoding="utf-8")


def reward_input(config: GRPOConfig) -> partial[np.ndarray]:
    """A function (messages, tokenizer) -> `conversation_ids` in the template of the reward model (no endpoint)."""
    assert config.reward_model is not None
    template = reward_template(config.reward_model)
    return partial(conversation_ids, template=template, key="reward_model.template", arguments=config.data.clock)


def check_reward_input(config: GRPOConfig, prompt: Prompt, tokenizer: Any) -> None:
    """Raise a ValueError if the template of the reward model does not write all of a prompt."""
    how = reward_input(config).keywords
    messages = [*prompt.messages, {"role": "assistant", "content": STAND_IN}]
    said = conversation(messages, how["template"], tokenizer, None)
    try:
        options = {"add_generation_prompt": False, **how["arguments"]}
        form_for(said, how["template"], tokenizer, how["key"], options)
    except ValueError as error:
        where = f"{how['key']}={how['template']}: "
        raise ValueError(f"{where}{prompt.id}: {str(error).removeprefix(where)}") from None


def conversation_ids(
    messages: Sequence[dict[str, Any]],
    tokenizer: Any,
    *,
    template: TemplateName,
    key: str,
    arguments: Mapping[str, Any] | None = None,
    tools: Any = None,
    trained: bool = False,
    notes: Counter[str] | None = None,
) -> np.ndarray:
    """Token ids [L] int32 of a prompt and its response (the last message), as a reward model reads them.

    In plain text the response directly follows the prompt, as in the policy's own sequence.

    Args:
        key: key of the template in the config, for errors of `render_whole`.
        trained: the response comes from a row and must be written completely; else the model has sampled it.
        notes: counts parts of messages that the template does not write.
    """
    if template in PLAIN:
        *prompt, response = messages
        text = render(prompt, template, tokenizer, tools=tools, notes=notes) + response["content"]
    else:
        options = {"tools": tools, "add_generation_prompt": False, **(arguments or {})}
        strict = [len(messages) - 1] if trained else []
        text = render_whole(messages, template, tokenizer, key, options, strict=strict, checked=trained, notes=notes)
    return tokenize([text], template, tokenizer)[0]


def apply_template(
    messages: Sequence[dict[str, Any]], template: TemplateName, tokenizer: Any, key: str, options: Mapping[str, Any]
) -> Any:
    """The text of a conversation, or whatever else `options` ask for.

    ValueError without a template, or if it refuses the messages.
    """
    check_has_template(template, tokenizer, key)
    options = {"chat_template": chat_template(template), "tokenize": False, **options}
    try:
        with limited(_limit_message(key, template, tokenizer)):
            text = tokenizer.apply_chat_template(list(messages), **options)
        if isinstance(text, str) and len(text) > MAX_TEXT:
            raise ValueError(f"it writes {len(text):,} characters")
        return text
    except Exception as error:  # a template is a program and may raise any type
        roles = [message["role"] for message in messages]
        remedy = (
            "Unset data.system_prompt if the model knows no system role, or choose" if "system" in roles else "Choose"
        )
        raise ValueError(
            f"{key}={template}: the chat template refuses messages with the roles {', '.join(roles)} "
            f"({str(error) or type(error).__name__}). {remedy} another template."
        ) from error


def _limit_message(key: str, template: TemplateName, tokenizer: Any) -> str:
    """The message of `limited` for a template."""
    of_model = f" of {tokenizer.name_or_path}" if template == "model" else ""
    return f"{key}={template}: the chat template{of_model} {{}}. Correct it, or choose another one with {key}."


def tagged_ids(
    messages: Sequence[dict[str, Any]], template: TemplateName, tokenizer: Any, key: str, options: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The ids [L] int32 of a conversation, and a mask [L] that is True inside the template's {% generation %} tags."""
    if MARK not in json.dumps([messages, options], ensure_ascii=False, default=str):
        whole = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = apply_template(messages, template, tokenizer, key, {**options, **whole})
        return np.array(encoded["input_ids"], np.int32), np.array(encoded["assistant_masks"], bool)
    from transformers.utils.chat_template_utils import render_jinja_template

    text = apply_template(messages, template, tokenizer, key, options)
    source = tokenizer.get_chat_template(chat_template(template), tools=options["tools"])
    arguments = {**tokenizer.special_tokens_map, **options, "return_assistant_tokens_mask": True}
    with limited(_limit_message(key, template, tokenizer)):
        rendered: Any = render_jinja_template([list(messages)], chat_template=source, **arguments)
    spans = rendered[1][0]
    ids, offsets = _encode_pieces(text, tokenizer, with_places=True)
    bounds = [[len(without_marks(text[:offset])) for offset in span] for span in spans]
    inside = [any(start <= offset < end for start, end in bounds) for offset in offsets]
    return np.array(ids, np.int32), np.array(inside, bool)


def check_has_template(template: TemplateName, tokenizer: Any, key: str) -> None:
    """Raise a ValueError if the template is the tokenizer's own and it has none."""
    if template == "model" and not tokenizer.chat_template:
        raise ValueError(
            f"{key}=model: the model's tokenizer has no chat template. "
            f"Use one of {', '.join(CHAT_TEMPLATES)}, qa or raw, or a model that was trained to chat."
        )


def tokenize(texts: Sequence[str], template: TemplateName, tokenizer: Any) -> list[np.ndarray]:
    """Token ids [P] int32 of each rendered prompt, without the marks of `control_tokens`."""
    bos = tokenizer.bos_token_id
    plain = template in PLAIN
    begins_with_bos = plain and bos is not None and tokenizer("a")["input_ids"][0] == bos
    token_ids = []
    for start in range(0, len(texts), ROWS_PER_BATCH):
        batch = [as_utf8(text) for text in texts[start : start + ROWS_PER_BATCH]]  # programs may send lone surrogates
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        rows = encoded["input_ids"]
        if not plain:
            rows = [
                _encode_pieces(text, tokenizer)[0] if MARK in text else ids
                for text, ids in zip(batch, rows, strict=True)
            ]
        token_ids += [np.array([bos] * begins_with_bos + ids, dtype=np.int32) for ids in rows]
    return token_ids


def first_difference(was: np.ndarray, now: np.ndarray, tokenizer: Any) -> str:
    """`'TEXT' becomes 'TEXT'`: the first tokens at which two sequences of ids differ."""
    overlap = min(len(was), len(now))
    different = np.flatnonzero(was[:overlap] != now[:overlap])
    at = int(different[0]) if len(different) else overlap
    return " becomes ".join(repr(tokenizer.decode(ids[at : at + TOKENS_SHOWN].tolist())) for ids in (was, now))


def _encode_pieces(text: str, tokenizer: Any, *, with_places: bool = False) -> tuple[list[int], list[int]]:
    """The ids of a rendered text with marks; `with_places`: also the offset of each in the text without marks.

    A piece is tokenized after an end token, which is then removed, because some tokenizers add a space at the beginning
    of a text.
    """
    ids, places, length = list[int](), list[int](), 0
    for number, piece in enumerate(split(text)):
        before = tokenizer.eos_token if number and tokenizer.eos_token else ""
        encoded = tokenizer(before + piece, add_special_tokens=False, return_offsets_mapping=with_places)
        skipped = 1 if before else 0
        ids += encoded["input_ids"][skipped:]
        if with_places:
            places += [length + start - len(before) for start, _ in encoded["offset_mapping"][skipped:]]
        length += len(piece)
    return ids, places
