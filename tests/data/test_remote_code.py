"""The code of a model's repository is not run unless the config asks for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from worlds import make_config

from rlhf.data.model_files import load_tokenizer
from rlhf.learner.hub_format import empty_model
from rlhf.learner.policy_model import load_policy
from rlhf.sampling.requests import engine_arguments

CODE = """
from pathlib import Path
Path({canary!r}).write_text("run")
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "hostile"
class Model(PreTrainedModel):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that the code of `hostile` writes."""
    return tmp_path / "canary"


@pytest.fixture
def hostile(tmp_path: Path, tiny_model_dir: Path, canary: Path) -> Path:
    """A model folder whose config and tokenizer name classes of a file in it."""
    folder = tmp_path / "hostile"
    shutil.copytree(tiny_model_dir / "model", folder)
    (folder / "hostile.py").write_text(CODE.format(canary=str(canary)))
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "hostile.Config", "AutoModelForCausalLM": "hostile.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "hostile", "auto_map": classes}))
    of_tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    of_tokenizer |= {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["hostile.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    return folder


def test_the_key_is_off_and_the_engines_get_it_as_it_is(hostile: Path) -> None:
    config = make_config(hostile)
    assert config.model.trust_remote_code is False
    assert engine_arguments(config, seed=0)["trust_remote_code"] is False


def test_a_model_that_needs_code_of_its_repository_is_refused_and_nothing_of_it_is_run(
    hostile: Path, canary: Path
) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_policy(make_config(hostile).model, temperature=1.0)
    with pytest.raises(ValueError, match="trust_remote_code"):
        empty_model(hostile, dtype="float32", trust_remote_code=False)
    with pytest.raises(ValueError, match=r"^model\.path=.*\btokenizer\b"):
        load_tokenizer(make_config(hostile).model)
    assert not canary.exists()


def test_it_is_run_where_the_config_asks_for_it(
    hostile: Path, canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    load_tokenizer(make_config(hostile, model={"path": str(hostile), "trust_remote_code": True}).model)
    assert canary.exists()
