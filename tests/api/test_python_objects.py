"""Objects in place of names: what stands in the config, what reaches the processes, and what is refused."""

from __future__ import annotations

import datetime
import functools
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_type_hints

import datasets
import numpy as np
import pandas
import pytest
from waiting import WAIT_S

import rlhf
from rlhf.api.configs import read_config
from rlhf.api.names import name_object, shown
from rlhf.config.grpo import GRPOConfig
from rlhf.processes import objects
from rlhf.processes.code import load_function

LOCK = threading.Lock()
ADAPTED = SimpleNamespace(save_pretrained=print, peft_config={})
ROWS = [{"question": f"{n}+1=?", "answer": str(n + 1)} for n in range(8)]
KEYS = {"rollout.prompts_per_step": 2, "rollout.samples_per_prompt": 2, "rollout.max_response_tokens": 8}


def locked(response: str, **_: Any) -> float:
    with LOCK:
        return 0.0


def make_reward(bonus: float) -> Any:
    def own(response: str, **_: Any) -> float:
        return bonus

    return own


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, response: str, **_: Any) -> float:
        return self.by


class Game:
    def reset(self, **row: Any) -> None: ...


def config_of(folder: Path, *layers: Any, **given: Any) -> Any:
    given = {"data": "my/rows.jsonl", "model": "my/model", "run.dir": str(folder / "run"), "run.steps": 2, **given}
    return rlhf.load_config(layers, **{**KEYS, **given})


# --- names ---


def test_an_object_of_an_importable_module_is_its_name(tmp_path: Path) -> None:
    config = config_of(tmp_path, reward=[locked, "math"], environment=Game)
    assert [part.name for part in config.reward.parts] == [f"{__name__}:locked", "math"]
    assert config.environment.name == f"{__name__}:Game"


def test_others_get_a_name_each_and_the_same_object_has_one(tmp_path: Path) -> None:
    one, two = make_reward(1.0), make_reward(2.0)
    parts = [one, {"name": two, "weight": 2.0}, Scale(3.0), lambda response, **_: 4.0]
    config = config_of(tmp_path, reward=parts, **{"evaluation.metric": two})
    names = [part.name for part in config.reward.parts]
    assert names == ["__main__:own", "__main__:own_2", "__main__:Scale", "__main__:lambda"]
    assert config.evaluation.metric == "__main__:own_2"
    assert config.reward.parts[1].weight == 2.0
    assert [load_function(name)("") for name in names] == [1.0, 2.0, 3.0, 4.0]


def test_a_function_that_is_defined_again_takes_the_name(tmp_path: Path) -> None:
    for bonus in (1.0, 2.0):
        name = config_of(tmp_path, reward=make_reward(bonus)).reward.parts[0].name
        assert (name, load_function(name)("")) == ("__main__:own", bonus)


def test_a_config_keeps_its_objects_when_others_take_their_names(tmp_path: Path) -> None:
    one, two = (config_of(tmp_path, reward=make_reward(bonus)) for bonus in (1.0, 2.0))
    for layers, name, value in ((one, "own", 1.0), ([two, one], "own_2", 1.0), ([one, {"run.seed": 3}], "own", 1.0)):
        config = rlhf.load_config(layers)
        assert (config.reward.parts[0].name, load_function(f"__main__:{name}")("")) == (f"__main__:{name}", value)
    copied = rlhf.load_config(two.model_copy())
    with objects.of_run(copied):
        assert objects.sent().keys() == {"__main__:own"}
    load_config = functools.partial(config_of, tmp_path, reward=make_reward(3.0))
    with objects.of_run(two):
        assert load_config().reward.parts[0].name == "__main__:own_2"
        assert load_function("__main__:own")("") == 2.0
        assert objects.sent().keys() == {"__main__:own"}
    assert load_config().reward.parts[0].name == "__main__:own"
    assert objects.sent() == {}


def test_a_function_with_the_name_of_a_reward_of_ours_gets_another_since_metrics_have_the_name_alone() -> None:
    assert name_object(type("math", (), {"__module__": "none"}), "reward", names=set()) == "__main__:math_2"


def test_a_callback_stays_in_the_driver_and_need_not_be_picklable() -> None:
    callback = threading.Lock()
    name = name_object(callback, "run.callbacks", names=set(), is_sent=False)
    assert objects.namespace(name).lock is callback
    assert objects.sent([name]) == {}


def as_received(value: Any) -> Any:
    """The object as another process gets it."""
    name = name_object(value, "tools", names=set())
    objects.receive(objects.sent([name]))
    return load_function(name)


@pytest.mark.private
def test_a_function_is_sent_with_the_types_that_its_annotations_name_as_text() -> None:
    def look(kind: Literal["a", "b"], folder: Path | None = None) -> str:
        return kind

    received = as_received(look)
    assert received is not look
    assert get_type_hints(received) == {"kind": Literal["a", "b"], "folder": Path | None, "return": str}


def test_a_class_of_a_cell_whose_source_python_does_not_find_is_compared_by_its_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def digest() -> str:
        return objects.get(name_object(Scale(1.0), "reward", names=set())).source

    monkeypatch.setattr(Scale, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    before = digest()
    assert before
    monkeypatch.setattr(Scale, "__call__", make_reward(1.0))
    assert digest() != before


@pytest.mark.private
def test_what_functools_cache_has_wrapped_is_sent_with_an_empty_cache() -> None:
    made = []

    @functools.lru_cache(maxsize=3)
    def table(size: int) -> int:
        made.append(size)
        return size if size < 2 else table(size - 1) + table(size - 2)

    def own(response: str, **_: Any) -> float:
        return float(table(int(response)))

    table(2)
    for received in (as_received(table), as_received(own)):
        assert float(received("5" if received.__name__ == "own" else 5)) == 5.0
    assert as_received(table).cache_info()[1:] == (0, 3, 0)
    assert made == [2, 1, 0]


def test_an_object_that_cannot_be_unpickled_says_so() -> None:
    class Own:
        def __reduce__(self) -> Any:
            return int, ("x",)

        def __call__(self, response: str, **_: Any) -> float:
            return 0.0

    with pytest.raises(
        ValueError, match=r"it cannot be unpickled: ValueError: invalid .*Put it into a module, and giv"
    ):
        as_received(Own())


SCRIPT = """
    import sys

    import rlhf
    from rlhf.rewards.scorer import Scorer
    from rlhf.types import Prompt

    SUFFIX = "!"

    class Ending:
        def __init__(self, text):
            self.text = text

    def helper(response):
        return response.strip()

    def reward(response, *, answer, **_):
        open_files = []
        try:
            open("/etc/hostname-of-nobody", "w")
        except OSError as error:
            open_files.append(type(error).__name__)
        return {"score": float(helper(response).endswith(Ending(answer + SUFFIX).text)), "refused": len(open_files)}

    if __name__ == "__main__":
        config = rlhf.load_config(reward=reward, data="d.jsonl", model="m", **{
            "run.dir": "r", "run.steps": 1, "rollout.prompts_per_step": 1, "rollout.samples_per_prompt": 2,
            "rollout.max_response_tokens": 8,
        })
        from rlhf.rewards.pool import Pool

        with Pool(workers=1, user_functions=config.reward.parts) as pool:
            job = {"name": "__main__:reward", "options": {}, "answer": "7", "columns": {}, "metadata": {}}
            for response in ("it is 7! ", "8", None):
                grade = pool.submit({**job, "response": response}).result()
                print(grade.value, grade.metrics, grade.detail)
            print(*pool.sources["__main__:reward"])
"""


@pytest.mark.private
@pytest.mark.slow
def test_a_function_of_a_script_is_sent_by_value_and_runs_confined(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.stdout.splitlines() == [
        "1.0 {'refused': 1.0} ",
        "0.0 {'refused': 1.0} ",
        f"None {{}} {tmp_path}/script.py:15: AttributeError: 'NoneType' object has no attribute 'strip'",
        "its source text",
    ], done.stderr


# --- rows and models ---


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def rows() -> Iterator[dict[str, Any]]:
    yield from ROWS


@pytest.mark.parametrize("given", [ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS), rows], ids=type)
def test_rows_become_a_file_of_the_run_folder(tmp_path: Path, given: Any) -> None:
    config = config_of(tmp_path, data=given() if callable(given) else given, eval_data=ROWS[:2])
    (train,), (test,) = config.data.train, config.data.eval
    assert [train.path, test.path] == [
        str(tmp_path / "run" / "objects" / f"{name}.jsonl") for name in ("train", "test")
    ]
    assert (read(train.path), read(test.path)) == (ROWS, ROWS[:2])
    assert (train.label, test.label) == ("train", "test")


def test_several_sets_of_rows_have_names_and_a_file_or_hub_name_stays_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, eval_data={"easy": ROWS[:1], "hard-1": ROWS[1:]}, data={"path": "a/b", "split": "x"})
    assert [source.label for source in config.data.eval] == ["easy", "hard-1"]
    assert [(source.path, source.split) for source in config.data.train] == [("a/b", "x")]
    assert [source.path for source in config_of(tmp_path, data=["a.jsonl", Path("b.jsonl")]).data.train] == [
        "a.jsonl",
        "b.jsonl",
    ]


def test_a_list_may_hold_data_sets_by_path(tmp_path: Path) -> None:
    config = config_of(tmp_path, data=[{"path": "a.jsonl", "rows": 2}, {"path": "b/c", "split": "x"}])
    assert [source.label for source in config.data.train] == ["a", "c"]


def test_rows_are_read_and_written_only_for_a_config_that_is_valid(tmp_path: Path) -> None:
    left = iter(ROWS)
    with pytest.raises(ValueError, match=r"run.stepz"):
        config_of(tmp_path, data=left, **{"run.stepz": 3})
    assert [*left] == ROWS
    with pytest.raises(ValueError, match="row 2"):
        config_of(tmp_path, data=[ROWS[0], 3])
    assert [*tmp_path.rglob("*.jsonl*")] == []


def test_a_resumed_run_refuses_other_rows_and_keeps_those_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = {"data": ROWS, "model": "m", "reward": "math", "run.dir": str(run), "run.steps": 2, **KEYS}
    read_config((), program="grpo", given=given)
    (run / "config.yaml").write_text("")
    (run / "metrics.jsonl").write_text('{"step": 3}\n')
    read_config((), program="grpo", given=given, resume=True)
    with pytest.raises(ValueError, match=r"data.train: other rows than those of the run, which are in .*Give the same"):
        read_config((), program="grpo", given={**given, "data": ROWS[1:]}, resume=True)
    assert [path.name for path in (run / "objects").iterdir()] == ["train.jsonl"]
    assert read(str(run / "objects" / "train.jsonl")) == ROWS


def test_values_that_json_lacks_are_written_as_data_files_have_them(tmp_path: Path) -> None:
    row = {"question": "?", "answer": np.int64(3), "day": datetime.date(2026, 1, 2), "xs": np.arange(2), "t": (1, None)}
    config = config_of(tmp_path, data=[row])
    assert read(config.data.train[0].path) == [
        {"question": "?", "answer": 3, "day": "2026-01-02", "xs": [0, 1], "t": [1, None]}
    ]


@pytest.mark.slow
def test_a_model_and_tokenizer_that_were_changed_in_memory_are_saved_first(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tiny_model_dir / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template = "changed {{ messages }}"
    model.resize_token_embeddings(len(tokenizer))
    saved = Path(config_of(tmp_path, model=model, tokenizer=tokenizer).model.path)
    assert saved == tmp_path / "run" / "objects" / "model"
    read_back = AutoTokenizer.from_pretrained(saved)
    assert (read_back.chat_template, len(read_back)) == (tokenizer.chat_template, len(tokenizer))
    assert AutoModelForCausalLM.from_pretrained(saved).get_input_embeddings().weight.shape[0] == len(tokenizer)

    del tokenizer.chat_template  # of a model that stays as it is
    tokenizer.chat_template = "other {{ messages }}"
    linked = Path(config_of(tmp_path, model=source, tokenizer=tokenizer).model.path)
    assert AutoTokenizer.from_pretrained(linked).chat_template == tokenizer.chat_template
    assert (linked / "model.safetensors").samefile(source / "model.safetensors")
    assert AutoTokenizer.from_pretrained(source).chat_template != tokenizer.chat_template


# --- layers ---


def test_layers_are_files_mappings_and_keys_and_later_ones_win(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: {steps: 5, seed: 3}\nlearner: {optimizer: {lr: 1.0e-5}}\n")
    layers = [tmp_path / "a.yaml", {"learner.optimizer.lr": 2e-5, "run": {"seed": 4}}]
    config = config_of(tmp_path, *layers, **{"run.steps": 7})
    assert isinstance(config, GRPOConfig)
    assert (config.run.steps, config.run.seed, config.learner.optimizer.lr) == (7, 4, 2e-5)
    again = rlhf.load_config(config, **{"run.seed": np.int64(9)})
    assert (again.run.steps, again.run.seed) == (7, 9)
    assert rlhf.load_config([config, again]) == again


# --- mistakes ---

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown argument": ({"rewards": locked}, "rewards=test_python_objects:locked: there is no such key"),
    "an unknown key": ({"run.stepz": 3}, "run.stepz=3: there is no such key. Did you mean run.steps?"),
    "a value of a wrong type": ({"run.steps": "many"}, "run.steps=many: input should be a valid integer"),
    "an object that is no value": ({"run.steps": {1, 2}}, "run.steps=<set object>: a config holds text, numbers"),
    "a function that cannot be pickled": (
        {"reward": lambda response, lock=LOCK, **_: 0.0},
        "reward.0=<function <lambda>>: it cannot be sent to the processes that run it: TypeError: cannot pickle",
    ),
    "an instance that is no function": ({"reward": object()}, "reward.0=<object object>: a config holds text"),
    "rows that are no dicts": ({"data": [1, 2]}, "data.train: row 1: it is a int, not a dict of columns."),
    "rows without a row": ({"data": iter(())}, "data.train: there is no row. Give at least one; an iterator gives"),
    "a column that no file can hold": (
        {"data": [ROWS[0], {"question": "?", "answer": LOCK}]},
        "data.train: row 2: column `answer`: it holds a lock, which no data file can hold. Give text, numbers",
    ),
    "data of all splits": (
        {"data": datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS))},
        "data.train: a DatasetDict of train, test. Give the split to train on: data[...].",
    ),
    "a data frame": ({"data": pandas.DataFrame(ROWS)}, 'its rows are no dicts. Give its .to_dict("records").'),
    "a model with adapters": ({"model": ADAPTED}, "model=<SimpleNamespace object>: it has adapters of peft, which"),
    "data that is none": ({"data": 7}, "data.train=<int object>: not data. Give a path, a hub name, or rows"),
    "a mapping that is no data": ({"data": {"a": 1}}, "data.train={'a': 1}: neither a `path` nor data sets of rows"),
    "a name of a data set": ({"eval_data": {"a b": ROWS}}, "data.eval.a b: 'a b' names a data set in metrics and fi"),
    "two sets of rows with one name": (
        {"data": ROWS, "eval_data": {"train": ROWS[:1]}},
        "data.eval.train: train names other rows of this config already. Give another name.",
    ),
    "a model that is none": ({"model": 3}, "model=<int object>: neither a path, a hub name nor a transformers model."),
    "a tokenizer alone": ({"tokenizer": LOCK, "model": None}, "tokenizer: without a model. Give model too"),
    "an unknown program": ({"program": "dpo"}, "program='dpo': there is no such program. Use one of grpo, ppo, sft"),
    "a missing file": ({"config": "nowhere.yaml"}, "--config nowhere.yaml: "),
    "no run folder": ({"run.dir": None, "data": ROWS}, "run.dir: required and not set. Set it in the YAML or as"),
    "another interpreter": (
        {"environment": {"name": type("Own", (), {"reset": lambda self: None}), "python": "/usr/bin/python3"}},
        "environment.python=/usr/bin/python3: environment.name=__main__:Own is an object of this Python program, which",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_one_message_with_key_value_reason_and_remedy(tmp_path: Path, mistake: str) -> None:
    given, message = MISTAKES[mistake]
    layers = [given["config"]] if "config" in given else []
    given = {name: value for name, value in given.items() if name != "config"}
    with pytest.raises(ValueError, match=r".") as refused:
        config_of(tmp_path, *layers, **given)
    assert message in str(refused.value)


def test_what_a_function_uses_is_named_if_it_cannot_be_sent_or_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    table, lock = "x" * 2**20, threading.Lock()

    def small(response: str, **_: Any) -> float:
        return len(table)

    def held(response: str, **_: Any) -> float:
        return lock.locked()

    with pytest.raises(ValueError, match=r"It uses the variable lock, a lock. Make such things inside the function"):
        name_object(held, "reward", names=set())
    monkeypatch.setattr("rlhf.api.names.MAX_BYTES", 2**20)
    with pytest.raises(ValueError, match=r"at most 1 MiB are sent. Its variable table has 1 MiB. Read large data"):
        name_object(small, "reward", names=set())
    assert shown(small).startswith("<function test_what")


def test_a_run_is_refused_outside_of_the_main_thread_or_while_another_one_uses_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for start in (rlhf.train, rlhf.evaluate_model):
        with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="runs in the main thread"):
            pool.submit(start, data=iter(ROWS)).result()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    trainer = rlhf.Trainer.__new__(rlhf.Trainer)
    trainer._thread = None
    for begin in (rlhf.train, rlhf.evaluate_model, trainer.open):
        with pytest.raises(ValueError, match=r"uses Ray already: a run has not ended, or .* Leave the context"):
            begin()


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")
    (run / "metrics.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(ValueError, match="already holds a run"):
        config_of(tmp_path, data=ROWS)
    assert not (run / "objects").exists()


def test_a_name_that_nobody_gave_says_where_it_came_from() -> None:
    with pytest.raises(
        ValueError, match=r"__main__:of_yesterday: an object of the Python program that began the run. "
    ):
        load_function("__main__:of_yesterday")


# --- the names of the package ---


@pytest.mark.slow
def test_the_names_are_there_whatever_was_imported_before_and_import_nothing_heavy() -> None:
    code = """
        import importlib, pkgutil, sys
        import rlhf
        heavy = {"torch", "ray", "pydantic", "transformers", "cloudpickle"} & sys.modules.keys()
        assert not heavy, heavy
        for module in pkgutil.walk_packages(rlhf.__path__, "rlhf."):
            if not module.name.endswith(("__main__", "verifiers_parts")):  # its packages are those of another Python
                importlib.import_module(module.name)
        for name in rlhf.__all__:
            assert callable(getattr(rlhf, name)), name
        assert rlhf.evaluate.__name__ == "rlhf.evaluate"
        assert {*rlhf.__all__} <= {*dir(rlhf)}
        print(*rlhf.__all__)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.stdout.endswith("evaluate_model load_config train\n"), done.stderr  # libraries print too
