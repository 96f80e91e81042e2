"""Data sets to prompts: columns, ground truth, lengths, and one message for every kind of bad data."""

from __future__ import annotations

import copy
import datetime
import json
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.data import DataConfig, SourceConfig
from rlhf.config.sections import ModelConfig
from rlhf.data.load import LoadedPrompts, first_prompt, load_prompts, show_prompt, with_rows
from rlhf.data.model_files import load_tokenizer
from rlhf.data.order import PromptStream
from rlhf.data.read import check_source

ROWS = [
    {"question": "How many?", "answer": "so it is\n#### 72", "level": 1},
    {"question": "What sum?", "answer": r"it is $\boxed{\frac{1}{2}}$", "level": 2},
    {"question": "Which?", "answer": "1,080", "level": 3},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level: a prompt in the raw template has as many tokens as bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    fast = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}"
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, for the data and for the caches of `datasets`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(tokenizer: Any, which: Any = "train", limit: int = 1000, **section: Any) -> LoadedPrompts:
    section = {"train": "train.jsonl", "template": "raw", "max_prompt_tokens": limit, **section}
    config = DataConfig.model_validate_json(json.dumps(section))
    return load_prompts(config, which, tokenizer)


def prompts(tokenizer: Any, *rows: dict[str, Any], **section: Any) -> list[str]:
    write_jsonl(Path("train.jsonl"), list(rows))
    loaded = load(tokenizer, **section).prompts["train"]
    return [tokenizer.decode(prompt.token_ids) for prompt in loaded]


def test_what_other_columns_say_of_a_prompt_is_written(folder: Path, tokenizer: Any) -> None:
    row = {"prompt": "Sum?", "answer": "3"}
    assert prompts(tokenizer, {**row, "system": "Be brief."}) == ["Be brief.\n\nSum?"]
    assert prompts(tokenizer, {**row, "system": "Be brief."}, system_prompt="Be long.") == ["Be brief.\n\nSum?"]
    assert prompts(tokenizer, {"instruction": "Sum?", "input": "1, 2", "answer": "3"}) == ["Sum?\n1, 2"]
    searches = {"question": "Who?", "prompt": [{"role": "user", "content": "Search. Who?"}]}  # Search-R1
    row = {**searches, "reward_model": {"ground_truth": {"target": ["Bob"]}}}
    assert prompts(tokenizer, row) == ["Search. Who?"]
    assert answers(load(tokenizer)) == ['["Bob"]']


def test_a_prompt_has_arguments_of_its_own_for_the_template(folder: Path, tokenizer: Any) -> None:
    styled = copy.deepcopy(tokenizer)
    styled.chat_template = "{{ style }}" + tokenizer.chat_template
    row = {"prompt": "Sum?", "answer": "3", "chat_template_kwargs": {"style": "calm"}}
    assert prompts(styled, row, template="model") == ["calmuser: Sum?<end>"]
    config = DataConfig.model_validate({"train": "train.jsonl", "date": datetime.date(2026, 1, 2)})
    with pytest.raises(ValueError, match="`chat_template_kwargs`: the later turns of an environment"):
        load_prompts(config, "train", styled, has_environment=True)
    write_jsonl(folder / "train.jsonl", [{"prompt": "Sum?", "answer": "3"}])
    assert len(load_prompts(config, "train", styled, has_environment=True).prompts["train"]) == 1


def answers(loaded: LoadedPrompts, source: str = "train") -> list[str]:
    return [prompt.answer for prompt in loaded.prompts[source]]


# --- what comes out ---


@pytest.mark.parametrize(
    ("ending", "in_thought"),
    [("<think>\n", True), ("[THINK]", True), ("<think>\n\n</think>\n\n", False), ("Think in <think> tags. A:", False)],
)
def test_a_prompt_says_whether_its_template_opens_a_thought(
    folder: Path, tokenizer: Any, ending: str, in_thought: bool
) -> None:
    write_jsonl(folder / "train.jsonl", ROWS)
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template += "{% if add_generation_prompt %}" + ending + "{% endif %}"
    assert first_prompt(load(thinking, template="model")).in_thought is in_thought


def test_a_row_becomes_a_prompt_with_its_tokens_its_answer_and_all_its_columns(folder: Path, tokenizer: Any) -> None:
    write_jsonl(folder / "train.jsonl", ROWS)
    loaded = load(tokenizer)
    assert answers(loaded) == ["72", r"\frac{1}{2}", "1,080"]
    prompt = first_prompt(loaded)
    assert (prompt.id, prompt.source, prompt.epoch) == ("train/1", "train", 0)
    assert prompt.messages == ({"role": "user", "content": "How many?"},)
    assert tokenizer.decode(prompt.token_ids.tolist()) == "How many?"
    assert prompt.columns == ROWS[0]
    assert prompt.is_text
    assert loaded.dropped_too_long == {"train": 0}


@pytest.mark.slow
def test_a_row_of_60_mb_or_of_100_000_brackets_is_named_with_its_line_at_once_or_left_out(
    folder: Path, tokenizer: Any
) -> None:
    huge, nested = json.dumps({"question": "x" * 60_000_000, "answer": "1"}), '{"question": ' + "[" * 100_000
    long = json.dumps({"question": "x" * 5_000_000, "answer": "1"})
    good = json.dumps(ROWS[0])
    for bad, message in (
        (huge, r"data\.train: line 2 of train\.jsonl\b.*\b60,000,\d+ bytes.*\b33,554,432\b"),
        (nested, r"data\.train: line 2 of train\.jsonl\b.*brackets within brackets"),
        (f'{{"a": {"9" * 5000}}}', r"data\.train: line 2 of train\.jsonl\b.*cannot be read \(Exceeds the limit"),
        (long, r"data\.train: row 2 of train\.jsonl: `question`.*\b5,000,000\b.*\b4,194,304\b"),
    ):
        (folder / "train.jsonl").write_text(f"{good}\n{bad}\n{good}\n")
        began = time.process_time()
        with pytest.raises(ValueError, match=message):
            load(tokenizer)
        assert time.process_time() - began < 2.0  # of the processor, on any machine; to tokenize it takes a minute
        loaded = load(tokenizer, on_bad_row="skip")
        assert [prompt.id for prompt in loaded.prompts["train"]] == ["train/1", "train/3"]
    (folder / "train.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"data\.train: train\.json\b.*brackets"):
        load(tokenizer, train="train.json")


def test_a_folder_with_files_of_two_formats_is_refused_since_one_would_not_be_read(
    folder: Path, tokenizer: Any
) -> None:
    (folder / "mine" / "more").mkdir(parents=True)
    write_jsonl(folder / "mine" / "a.jsonl", ROWS)
    (folder / "mine" / "more" / "b.json").write_text(json.dumps(ROWS))
    (folder / "mine" / "LICENSE.txt").write_text("mine")
    assert len(load(tokenizer, train="./mine").prompts["mine"]) == 2 * len(ROWS)
    (folder / "mine" / "b.csv").write_text("question,answer\n1+1?,2\n")
    with pytest.raises(ValueError, match=r"data\.train=\./mine: .*\(a\.jsonl, b\.csv"):
        load(tokenizer, train="./mine")
    (folder / "mine" / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: a.jsonl\n---\n")
    assert len(load(tokenizer, train="./mine").prompts["mine"]) == len(ROWS)


@pytest.mark.parametrize("kind", ["lines.jsonl", "lines.json", "list.json", "table.parquet", "bom.jsonl"])
def test_every_kind_of_file_gives_the_same_prompts(folder: Path, tokenizer: Any, kind: str) -> None:
    path = folder / kind
    if kind == "table.parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif kind == "list.json":
        path.write_text(json.dumps(ROWS, indent=1))
    else:
        write_jsonl(path, ROWS)
    if kind == "bom.jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    loaded = load(tokenizer, train={"path": kind, "source": "same"})
    assert answers(loaded, "same") == ["72", r"\frac{1}{2}", "1,080"]
    assert [prompt.id for prompt in loaded.prompts["same"]] == ["same/1", "same/2", "same/3"]
    assert loaded.prompts["same"][2].columns == ROWS[2]


def test_a_folder_of_files_and_one_that_datasets_saved_have_splits(
    folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    (folder / "files").mkdir()
    write_jsonl(folder / "files/train.jsonl", ROWS)
    write_jsonl(folder / "files/test.jsonl", ROWS[:1])
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(folder / "saved")
    loaded = load(tokenizer, train=["files", "saved"])
    assert answers(loaded, "files") == answers(loaded, "saved") == ["72", r"\frac{1}{2}", "1,080"]
    loaded = load(tokenizer, which="eval", eval=["files", "saved", {"path": "saved", "split": "train", "source": "x"}])
    assert {source: len(prompts) for source, prompts in loaded.prompts.items()} == {"files": 1, "saved": 1, "x": 3}
    with pytest.raises(ValueError, match=r"data\.train=files: .*'validation'"):
        load(tokenizer, train={"path": "files", "split": "validation"})


def test_columns_are_the_usual_ones_unless_named(folder: Path, tokenizer: Any) -> None:
    write_jsonl(
        folder / "train.jsonl", [{"Problem": "usual", "text": "named", "Solution": "1", "gold": {"value": "2"}}]
    )
    usual = first_prompt(load(tokenizer))
    assert (usual.messages[0]["content"], usual.answer) == ("usual", "1")
    named = first_prompt(load(tokenizer, prompt_column="text", answer_column="gold.value"))
    assert (named.messages[0]["content"], named.answer) == ("named", "2")
    source = {"path": "train.jsonl", "prompt_column": "text", "answer_column": "gold.value"}
    own = first_prompt(load(tokenizer, train=source, prompt_column="Problem"))
    assert (own.messages[0]["content"], own.answer) == ("named", "2")


def test_messages_are_used_as_they_are(folder: Path, tokenizer: Any) -> None:
    talk = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    write_jsonl(folder / "train.jsonl", [{"messages": talk, "ground_truth": 4}])
    prompt = first_prompt(load(tokenizer, template="model"))
    assert list(prompt.messages) == talk
    assert not prompt.is_text
    assert tokenizer.decode(prompt.token_ids.tolist()) == "user: 1+1?<end>assistant: 2<end>user: 2+2?<end>"
    assert prompt.answer == "4"


TOOLS = "{{ tools | tojson }}{% if brief %}Brief.{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
SCHEMA = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA]), [{**SCHEMA, "strict": None}]])
def test_a_template_in_a_file_is_given_the_tools_of_the_row_and_the_arguments_of_the_config(
    folder: Path, tokenizer: Any, tools: Any
) -> None:
    (folder / "own.jinja").write_text(TOOLS)
    write_jsonl(folder / "train.jsonl", [{"prompt": "1+1?", "answer": "2", "tools": tools}])
    prompt = first_prompt(load(tokenizer, template="own.jinja", chat_template_kwargs={"brief": True}))
    assert tokenizer.decode(prompt.token_ids.tolist()) == f"{json.dumps([SCHEMA])}Brief.1+1?"
    for template in ("raw", "qa", "chatml"):
        with pytest.raises(ValueError, match=r"row 1 of train\.jsonl: .*the template writes no tools"):
            load(tokenizer, template=template)


@pytest.mark.parametrize("tools", ["add", '{"a": 1}', [1], {"name": "add"}])
def test_tools_that_are_no_list_of_schemas_are_refused_with_the_row(folder: Path, tokenizer: Any, tools: Any) -> None:
    write_jsonl(folder / "train.jsonl", [{"prompt": "1+1?", "answer": "2", "tools": tools}])
    with pytest.raises(ValueError, match=r"row 1 of train\.jsonl: `tools` is .*, not a list of schemas"):
        load(tokenizer, template="model")


def test_a_template_file_that_is_not_there_is_named(folder: Path, tokenizer: Any) -> None:
    write_jsonl(folder / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"data\.template=none\.jinja: the file cannot be read"):
        load(tokenizer, template="none.jinja")


def test_system_prompt_and_suffix_are_added_but_a_rows_own_system_message_stays(folder: Path, tokenizer: Any) -> None:
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "b"}]
    write_jsonl(folder / "train.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": own, "answer": "1"}])
    loaded = load(tokenizer, template="model", system_prompt="Be brief.", prompt_suffix=r"Use \boxed{}.")
    texts = [tokenizer.decode(prompt.token_ids.tolist()) for prompt in loaded.prompts["train"]]
    assert texts == [
        "system: Be brief.<end>user: a\nUse \\boxed{}.<end>",
        "system: Own.<end>user: b\nUse \\boxed{}.<end>",
    ]


def test_a_blank_system_message_counts_as_none_and_the_suffix_follows_what_the_user_says(
    folder: Path, tokenizer: Any
) -> None:
    blank = [{"role": "system", "content": ""}, {"role": "user", "content": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": "{}"}]}
    acted = [*blank, call, {"role": "tool", "content": "3"}]
    write_jsonl(
        folder / "train.jsonl", [{"prompt": blank, "answer": "1"}, {"prompt": json.dumps(acted), "answer": "1"}]
    )
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}(){% endfor %}"
    (folder / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}" + calls + "<end>{% endfor %}"
    )
    loaded = load(tokenizer, template="own.jinja", system_prompt="Be brief.", prompt_suffix="Go.")
    texts = [tokenizer.decode(prompt.token_ids.tolist()) for prompt in loaded.prompts["train"]]
    assert texts == [
        "system: Be brief.<end>user: b\nGo.<end>",
        "system: Be brief.<end>user: b\nGo.<end>assistant: f()<end>tool: 3<end>",
    ]
    assert [prompt.is_text for prompt in loaded.prompts["train"]] == [False, False]
    plain = load(tokenizer, template="own.jinja").prompts["train"][0]
    assert tokenizer.decode(plain.token_ids.tolist()) == "system: <end>user: b<end>"


def test_a_row_of_verl_has_its_answer_in_a_nested_column(folder: Path, tokenizer: Any) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    }
    write_jsonl(folder / "train.jsonl", [row])
    loaded = load(tokenizer, template="model")
    prompt = first_prompt(loaded)
    assert (prompt.answer, prompt.columns["data_source"]) == ("2", "openai/gsm8k")
    note = "`data_source` is openai/gsm8k, while rewards and metrics use the label train (`source`)"
    assert loaded.notes["train"] == {note: 1}


def test_a_table_gives_messages_no_names_that_they_do_not_have(folder: Path, tokenizer: Any) -> None:
    import pyarrow
    from pyarrow import parquet

    calls = [
        {"function": {"name": name, "arguments": arguments}} for name, arguments in (("f", {"a": 1}), ("g", {"b": 2}))
    ]
    rows = [
        {"prompt": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "q"}]} for call in calls
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "own.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    loaded = load(tokenizer, train="train.parquet", template="own.jinja", answer_format="none")
    texts = [tokenizer.decode(prompt.token_ids.tolist()) for prompt in loaded.prompts["train"]]
    assert '"arguments": {"a": 1}' in texts[0]
    assert '"arguments": {"b": 2}' in texts[1]


def test_prompts_that_are_too_long_are_left_out_and_counted_and_the_others_keep_their_ids(
    folder: Path, tokenizer: Any
) -> None:
    write_jsonl(folder / "train.jsonl", [{"prompt": "x" * size, "answer": "1"} for size in (5, 11, 10, 12)])
    loaded = load(tokenizer, limit=10)
    assert [prompt.id for prompt in loaded.prompts["train"]] == ["train/1", "train/3"]
    assert loaded.dropped_too_long == {"train": 2}
    assert loaded.rows_per_epoch == {"train": 2}
    with pytest.raises(ValueError, match=r"data\.train=train\.jsonl: all 4 .*\b5 tokens\b.*\blimit is 4\b"):
        load(tokenizer, limit=4)


def test_evaluation_uses_the_first_rows_of_each_set(folder: Path, tokenizer: Any) -> None:
    write_jsonl(folder / "a.jsonl", ROWS)
    write_jsonl(folder / "b.jsonl", ROWS)
    loaded = load(tokenizer, which="eval", eval=["a.jsonl", {"path": "b.jsonl", "rows": 1}], eval_rows=2)
    assert {source: [p.id for p in prompts] for source, prompts in loaded.prompts.items()} == {
        "a": ["a/1", "a/2"],
        "b": ["b/1"],
    }
    assert load(tokenizer, which="eval").prompts == {}


def test_sources_are_mixed_by_weight_or_by_row_count(folder: Path, tokenizer: Any) -> None:
    for name, count in (("a", 30), ("b", 10)):
        write_jsonl(folder / f"{name}.jsonl", ROWS[:1] * count)
    weights = [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 0.5}]
    loaded = load(tokenizer, train=weights)
    assert loaded.rows_per_epoch == {"a": 20, "b": 10}  # b is the scarcer one for its weight: all of it is used
    assert load(tokenizer, train=["a.jsonl", {"path": "b.jsonl", "rows": 4}]).rows_per_epoch == {"a": 30, "b": 4}
    stream = PromptStream(loaded.prompts, rows_per_epoch=loaded.rows_per_epoch, seed=0)
    assert sum(prompt.source == "a" for prompt in stream.take(60)) == 40
    with pytest.raises(ValueError, match=r"data\.train\.1: rows=11\b.*b\.jsonl.*\b10\b"):
        load(tokenizer, train=["a.jsonl", {"path": "b.jsonl", "rows": 11}])


def test_data_without_answers_needs_answer_format_none(folder: Path, tokenizer: Any) -> None:
    write_jsonl(folder / "train.jsonl", [{"prompt": "Write a poem."}])
    with pytest.raises(ValueError, match=r"answer_column\b.*train\.jsonl\b.*\bprompt\b"):
        load(tokenizer)
    assert answers(load(tokenizer, answer_format="none")) == [""]


def test_the_first_prompt_is_shown_with_its_special_tokens_and_its_answer(folder: Path, tokenizer: Any) -> None:
    write_jsonl(folder / "train.jsonl", ROWS)
    shown = show_prompt(first_prompt(load(tokenizer, template="model")), tokenizer)
    assert shown == "prompt train/1 (16 tokens):\nuser: How many?<end>\nanswer: 72"


# --- bad data: one message with the key, the row, the reason and the remedy ---


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, r"row 2 of train\.jsonl\b.*`answer` is missing.*answer_format=none"),
        ({"answer": "1"}, r"row 2 of train\.jsonl\b.*`question` is missing"),
        ({"question": "", "answer": "1"}, r"row 2 of train\.jsonl\b.*`question` is empty"),
        ({"question": [], "answer": "1"}, r"row 2 of train\.jsonl: `question` is \[\]"),
        (
            {"question": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "answer": "1"},
            r"row 2 of train\.jsonl: .*`question` is the assistant's",
        ),
        ({"question": "half \ud83d", "answer": "1"}, r"row 2 of train\.jsonl: `question`.*surrogate pair"),
        ({"question": "q\0", "answer": "1"}, r"row 2 of train\.jsonl: `question`.*\bNUL\b"),
        ({"question": "q", "answer": "1\0"}, r"row 2 of train\.jsonl\b.*`answer`.*\bNUL\b"),
        ([1], r"row 2 of train\.jsonl is a list, not an object"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(folder: Path, tokenizer: Any, row: Any, message: str) -> None:
    write_jsonl(folder / "train.jsonl", [ROWS[0], row, ROWS[1]])
    with pytest.raises(ValueError, match=rf"^data\.train: {message}"):
        load(tokenizer)


@pytest.mark.parametrize("key", ["prompt_column", "answer_column"])
def test_a_column_that_is_not_there_lists_those_that_are(folder: Path, tokenizer: Any, key: str) -> None:
    write_jsonl(folder / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match=rf"{key}=nope: train\.jsonl\b.*\bquestion, answer, level\b"):
        load(tokenizer, **{key: "nope"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"question": "q"}\n\n{"question": \n',
            r"data\.train: line 3 of a\.jsonl\b.*\bJSON\b.*line 3, ",
        ),
        ("a.jsonl", b'{"question": "caf\xe9"}\n', r"data\.train: line 1 of a\.jsonl\b.*UTF-8.*\bbyte 17\b"),
        ("a.json", b'[{"question": "q"},\n {"question": }]', r"data\.train: a\.json\b.*\bJSON\b.*line 2, column 15\b"),
        ("a.jsonl", b"", r"data\.train=a\.jsonl: the file is empty"),
        ("a.jsonl", b"\n \n", r"data\.train=a\.jsonl: the data set holds no row"),
        ("a.json", b"[]", r"data\.train=a\.json: the data set holds no row"),
        ("a.parquet", b"PAR1", r"data\.train=a\.parquet: .*\bParquet\b"),
        ("a.csv", b"x", r"data\.train=a\.csv: .*\.csv.*\.jsonl, \.json, \.parquet"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_why(
    folder: Path, tokenizer: Any, name: str, content: bytes, message: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(tokenizer, train=name)


def test_missing_files_are_found_before_anything_is_read(folder: Path) -> None:
    write_jsonl(folder / "train.jsonl", ROWS)
    for path in ("train.jsonl", "openai/gsm8k"):
        check_source(SourceConfig(path=path), "data.train")
    with pytest.raises(ValueError, match=r"^data\.train=no/train\.jsonl: "):
        check_source(SourceConfig(path="no/train.jsonl"), "data.train")
    with pytest.raises(ValueError, match=r"^data\.eval\.1=\./nothing: "):
        check_source(SourceConfig(path="./nothing"), "data.eval.1")


def test_a_tokenizer_that_fails_without_a_text_is_reported_with_the_type_of_the_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(ValueError, match=r"^model\.path=\S+: .*tokenizer.*\(OSError\)"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_hub_name_is_asked_for_by_configuration_and_split_and_a_failure_is_one_message(
    folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked = []

    def hub(path: str, name: str | None = None, *, split: str) -> Any:
        asked.append((path, name, split))
        if path == "openai/gsm8k":
            return datasets.Dataset.from_list(ROWS)
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", hub)
    gsm8k = {"path": "openai/gsm8k", "name": "main"}
    assert answers(load(tokenizer, train=gsm8k), "gsm8k")[0] == "72"
    load(tokenizer, which="eval", eval=gsm8k)
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    with pytest.raises(ValueError, match=r"data\.train=some/other: .*Couldn't reach.*local \.jsonl"):
        load(tokenizer, train="some/other")


def test_bad_rows_are_left_out_and_counted_where_the_config_says_so(folder: Path, tokenizer: Any) -> None:
    good = json.dumps(ROWS[0])
    bad = [
        "{", "[1]", '{"answer": "1"}', '{"question": 5, "answer": "1"}', '{"question": "q"}',
        '{"question": "\\ud83d", "answer": "1"}', '{"question": "q", "answer": "\\u0000"}',
    ]  # fmt: skip
    (folder / "train.jsonl").write_text("\n".join([good, *bad, good]) + "\n")
    loaded = load(tokenizer, on_bad_row="skip")
    assert [prompt.id for prompt in loaded.prompts["train"]] == ["train/1", "train/9"]
    assert loaded.rows_per_epoch == {"train": 2}
    reasons = loaded.bad_rows["train"]
    assert len(reasons) == len(bad)
    assert all(any(f" {number} of train.jsonl" in reason for reason in reasons) for number in range(2, 9)), reasons
    with pytest.raises(ValueError, match=r"line 2 of train\.jsonl\b.*\bJSON\b"):
        load(tokenizer)
    (folder / "train.jsonl").write_text('{"question": "", "answer": "1"}\n' * 3)
    with pytest.raises(ValueError, match=r"data\.train=train\.jsonl: no row .*\brow 1 "):
        load(tokenizer, on_bad_row="skip")


# --- prompts that an environment makes ---


def test_an_environment_makes_prompts_that_have_other_ids_in_an_evaluation(folder: Path, tokenizer: Any) -> None:
    train = load(tokenizer, train=[{"path": "environment", "rows": 3}])
    held_out = load(tokenizer, "eval", train="a.jsonl", eval=[{"path": "environment", "rows": 2, "source": "games"}])
    assert [prompt.id for prompt in train.prompts["environment"]] == ["environment/1", "environment/2", "environment/3"]
    assert [prompt.id for prompt in held_out.prompts["games"]] == ["games/eval/1", "games/eval/2"]
    first = train.prompts["environment"][0]
    assert (first.messages, len(first.token_ids), train.rows_per_epoch) == ((), 0, {"environment": 3})
    assert (first.columns, held_out.prompts["games"][1].columns) == (
        {"number": 1, "split": "train"}, {"number": 2, "split": "eval"},
    )  # fmt: skip


def test_an_epoch_has_as_many_prompts_as_the_environment_has_problems(folder: Path, tokenizer: Any) -> None:
    def sizes(problems: int | None, **sections: Any) -> list[int]:
        config = DataConfig(train="environment", eval="environment", **sections)
        sets = {which: load_prompts(config, which, tokenizer) for which in ("train", "eval")}
        sized = [with_rows(config, which, loaded, problems) for which, loaded in sets.items()]
        assert [each.rows_per_epoch["environment"] for each in sized] == [
            len(each.prompts["environment"]) for each in sized
        ]
        return [len(each.prompts["environment"]) for each in sized]

    assert sizes(None) == [4096, 128]
    assert sizes(500) == [500, 128]
    assert sizes(20) == [20, 20]
    assert sizes(20, eval_rows=7) == [20, 7]
    assert sizes(20, eval_rows=50) == [20, 20]
    config = DataConfig(train=[{"path": "environment", "rows": 30}])
    with pytest.raises(ValueError, match="rows=30: the environment has only 20 problems"):
        with_rows(config, "train", load_prompts(config, "train", tokenizer), 20)
    with pytest.raises(ValueError, match=r"=environment: the environment has no problems for it\. `environment\.args"):
        with_rows(config, "train", load_prompts(config, "train", tokenizer), 0)


def test_rows_without_a_prompt_are_read_for_an_environment_alone(folder: Path, tokenizer: Any) -> None:
    write_jsonl(folder / "games.jsonl", [{"level": 1}, {"level": 2}])
    config = DataConfig(train="games.jsonl", template="raw")
    loaded = load_prompts(config, "train", tokenizer, has_environment=True)
    assert [(prompt.columns, prompt.messages) for prompt in loaded.prompts["games"]] == [
        ({"level": 1}, ()), ({"level": 2}, ()),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="prompt_column is not set"):
        load_prompts(config, "train", tokenizer)


@pytest.mark.parametrize(
    "columns",
    [
        {"images": ["a.png"]},
        {"image": {"bytes": "aGk="}},
        {"videos": "a.mp4"},
        {"question": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]},
    ],
)
def test_a_row_with_images_is_refused_by_name(folder: Path, tokenizer: Any, columns: dict[str, Any]) -> None:
    write_jsonl(folder / "train.jsonl", [ROWS[0], ROWS[1] | columns])
    with pytest.raises(ValueError, match=rf"row 2 of train\.jsonl: `{next(iter(columns))}` holds images"):
        load(tokenizer)
    assert len(load(tokenizer, on_bad_row="skip").prompts["train"]) == 1


def test_a_column_image_may_name_a_container(folder: Path, tokenizer: Any) -> None:
    write_jsonl(folder / "train.jsonl", [ROWS[0] | {"image": "python:3.12", "images": None}])
    assert len(load(tokenizer).prompts["train"]) == 1
