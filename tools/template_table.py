"""Give rows of each form to the chat templates of the `trl` wheel, and write the table of docs/models.md.

    python tools/template_table.py      # needs the extra bench

A row's last turn is trained. A cell is `+` if everything that the row says stands in the tokens, looked for here by
words of its own, `-` if the row is refused, and `SILENT` if neither: then something is wrong.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from byte_tokenizer import byte_tokenizer

from rlhf.config.supervised import SFTDataConfig
from rlhf.data.conversations import SFTEncoder
from tools.model_table import write_table

DATE = datetime.date(2001, 2, 3)
DATES = ("2001-02-03", "03 Feb 2001", "February 3, 2001")

USER = {"role": "user", "content": "aword asks"}
ANSWER = {"role": "assistant", "content": "bword says"}
PARAMETERS = {"type": "object", "properties": {"dword": {"type": "string", "description": "eword"}}}
TOOLS = [{"type": "function", "function": {"name": "fword", "description": "gword", "parameters": PARAMETERS}}]


def called(arguments: Any) -> list[dict[str, Any]]:
    """A conversation with an earlier call."""
    call = {"id": "call00001", "type": "function", "function": {"name": "fword", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "call00001", "name": "fword", "content": "hword"}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, answer, ANSWER]


def thought(name: str) -> list[dict[str, Any]]:
    return [USER, {**ANSWER, name: "iword thinks"}]


# the columns of the table: messages of a row, the words that it says, and its tools
Form = tuple[list[dict[str, Any]], tuple[str, ...], Any]
CALL_WORDS, THOUGHT_WORDS = ("aword", "bword", "fword", "dword", "jword", "hword"), ("aword", "bword", "iword")
FORMS: dict[str, Form] = {
    "system": ([{"role": "system", "content": "kword"}, USER, ANSWER], ("kword", "aword", "bword"), None),
    "call, text": (called('{"dword": "jword"}'), CALL_WORDS, None),
    "call, object": (called({"dword": "jword"}), CALL_WORDS, None),
    "`reasoning_content`": (thought("reasoning_content"), THOUGHT_WORDS, None),
    "`reasoning`": (thought("reasoning"), THOUGHT_WORDS, None),
    "`thinking`": (thought("thinking"), THOUGHT_WORDS, None),
    "inline": ([USER, {**ANSWER, "content": "<think>\niword thinks\n</think>\n\nbword says"}], THOUGHT_WORDS, None),
    "tools": ([USER, ANSWER], ("aword", "bword", "fword", "gword", "dword", "eword"), TOOLS),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "aword"}, {"type": "text", "text": "cword"}]}, ANSWER],
        ("aword", "cword", "bword"),
        None,
    ),
}
HEADER = ("template", *FORMS, "date")


def cell(tokenizer: Any, form: Form) -> str:
    messages, words, tools = form
    row = {"prompt": messages[:-1], "completion": messages[-1:], "tools": tools}
    text = trained_text(tokenizer, row)
    if text is None:
        return "-"
    return "+" if all(word in text for word in words) and '\\"' not in text else "SILENT"


def trained_text(tokenizer: Any, row: dict[str, Any]) -> str | None:
    """A row as it is trained; None if it is refused."""
    arguments = SFTDataConfig.model_validate({"train": "rows.jsonl", "date": DATE}).template_arguments
    try:
        ((ids, _),) = SFTEncoder(tokenizer, "model", arguments)(row)
    except ValueError:
        return None
    return str(tokenizer.decode(ids.tolist()))


def date_cell(tokenizer: Any) -> str:
    """Whether the text of a day is that of data.date, for a template that writes one."""
    if "strftime_now" not in tokenizer.chat_template:
        return ""
    text = trained_text(tokenizer, {"prompt": [USER], "completion": [ANSWER]}) or ""
    return "+" if any(date in text for date in DATES) else "SILENT"


def templates() -> dict[str, str]:
    """The sources of the wheel's templates by name."""
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def lines() -> Iterator[str]:
    """The table; templates with the same cells share a line."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, source in templates().items():
        tokenizer = byte_tokenizer(source)
        cells = (*(cell(tokenizer, form) for form in FORMS.values()), date_cell(tokenizer))
        rows.setdefault(cells, []).append(name)
    yield f"| {' | '.join(HEADER)} |"
    yield f"|---{'|:---:' * (len(HEADER) - 1)}|"
    for cells, names in sorted(rows.items(), key=lambda row: row[1]):
        yield f"| {', '.join(names)} | {' | '.join(cells)} |"


if __name__ == "__main__":
    write_table("template_table.py", lines())
