"""A hub that does not answer: what is in the cache is used, anything else is one message."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import WAIT_S

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys
from rlhf.config.sections import ModelConfig
from rlhf.data.model_files import load_tokenizer
print(len(load_tokenizer(ModelConfig(path="somebody/cached"))), os.environ["HF_HUB_OFFLINE"])
load_tokenizer(ModelConfig(path="somebody/missing"))
"""


def test_the_cache_is_used_and_what_it_lacks_is_one_message(tiny_model_dir: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub/models--somebody--cached"
    shutil.copytree(tiny_model_dir / "model", repository / "snapshots/0123")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123")
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(repository.parent), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | hub, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    size, offline = done.stdout.split()
    assert int(size) > 0
    assert offline == "1"  # for the processes of engines and learners
    assert "Retrying" not in done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ValueError: model.path=somebody/missing: its tokenizer cannot be loaded (")
