"""Files that are no files, or that would take all time and memory: a message at once, which names the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.config import limit
from rlhf.config.load import read_values, resolved, stored_values
from rlhf.config.model_folder import read_json
from rlhf.data.model_files import local_model_config
from rlhf.data.templates import chat_template
from rlhf.processes.code import load_function
from rlhf.run.folder import RunFolder

pytestmark = pytest.mark.slow


def _bomb(entry: str) -> str:
    """Ten levels, each of which names the one before it ten times."""
    levels = [f"a{n}: &a{n} {entry.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 11)]
    return "\n".join(["a0: &a0 {k: 1}", *levels])


LENGTH = "longer than 262,144 characters, or deeper than 50 levels"
TEXTS = {
    "aliases": (_bomb("[{}]"), LENGTH),
    "merge keys": (_bomb("{{<<: [{}], k: 1}}"), LENGTH),
    "an alias of itself": ("a: &a [*a]", LENGTH),
    "levels": ("run: " + "{a: " * 60 + "1" + "}" * 60, LENGTH),
    "more levels": ("run: " + "[" * 5000, "recursion"),
    "a long text": (f"a: {'x' * 2**18}", LENGTH),
    "a number of many digits": (f"a: 0x{'f' * 9999}", "digits"),
    "a date": ("a: !!timestamp 2001-01-01", "not a supported primitive type"),
    "bytes": ("a: !!binary aGVsbG8=", "bytes"),
    "an object of Python": ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
}
KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "it is a pipe": (lambda path: os.mkfifo(path), "it is a pipe"),
    "it is a device": (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "it is a folder": (lambda path: path.mkdir(), "it is a folder"),
    "a text in another encoding": (lambda path: path.write_bytes(b'{"a": "\xff"}'), "can't decode"),
}
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "--config": ("--config {}: ", lambda file: read_values([str(file)], [])),
    "the config of a run": ("{}: ", stored_values),
    "a chat template": ("data.template={}: the file cannot be read ", lambda file: chat_template(str(file))),
    "JSON of a model": ("{}: ", read_json),
}


@pytest.mark.parametrize("given", ["a file", "an override"])
@pytest.mark.parametrize("name", TEXTS)
def test_yaml_that_multiplies_or_is_no_json_is_refused_by_its_name(name: str, given: str, tmp_path: Path) -> None:
    text, why = TEXTS[name]
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=why) as refused:
        read_values([str(file)], []) if given == "a file" else read_values([], [f"key={text}"])
    assert str(refused.value).startswith(f"--config {file}: " if given == "a file" else "'key=")


def test_a_key_of_an_override_has_few_levels() -> None:
    with pytest.raises(ValueError, match="not an override"):
        read_values([], [f"{'a.' * 5000}b=1"])


def test_references_that_multiply_end_the_program_and_others_need_no_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr("rlhf.config.load.limited", lambda message: messages.append(message) or limit.limited(message))
    assert resolved({"a": "x", "b": ["${a}"]}, "--config mine.yaml") == {"a": "x", "b": ["x"]}
    assert resolved({"a": "x"}, "--config plain.yaml") == {"a": "x"}
    (message,) = messages
    with pytest.raises(ValueError, match=r"^--config deep\.yaml: a value has too many \$\{\.\.\.\} within another"):
        resolved({"a": "${oc.env:" * 500 + "}" * 500}, "--config deep.yaml")
    assert message.startswith("--config mine.yaml: to follow the references ${...} {}. ")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_a_path_that_is_no_text_file_is_named_and_never_waited_for(reader: str, kind: str, tmp_path: Path) -> None:
    (make, why), (named, read) = KINDS[kind], READERS[reader]
    make(file := tmp_path / "given.jinja")
    with pytest.raises(ValueError, match=why) as refused:
        read(file)
    assert str(refused.value).startswith(named.format(file))


@pytest.mark.parametrize(
    "text", ["[1]", "5", "null", '"x"', "[" * 100_000, "", "\ufeff{}", '{"a": ' + "9" * 9999 + "}"]
)
def test_json_that_is_no_object_is_named(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"it (is not JSON|holds no JSON object)") as refused:
        local_model_config(str(tmp_path))
    assert str(refused.value).startswith(f"{file}: ")
    (tmp_path / "driver.json").write_text(text)
    with pytest.raises(ValueError, match=r"driver\.json: not a state that this version reads"):
        RunFolder.read_state(tmp_path)


@pytest.mark.parametrize(
    "text", ['"vocab_size": "x"', '"head_dim": [1]', '"hidden_size": NaN', '"num_hidden_layers": 100000000',
             '"text_config": [1]', '"model_type": [["llama"]]', '"text_config": {"vocab_size": -1}'],
)  # fmt: skip
def test_a_size_of_a_model_is_a_number_that_a_model_can_have(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "config.json").write_text(f'{{"model_type": "llama", {text}}}')
    with pytest.raises(ValueError, match=r"is (not a whole number from 0 to|no object|no text)") as refused:
        local_model_config(str(tmp_path))
    assert str(refused.value).startswith(f"{file}: ")


def test_a_pipe_in_place_of_a_users_code_is_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(file := tmp_path / "rewards.py")
    with pytest.raises(ValueError, match=r"no file, but a folder, pipe or device: .*rewards\.py'\. Correct the path"):
        load_function(f"{file}:grade")
