"""A teacher behind vLLM's own server gives the log-probs, and so the advantages, of the same model in torch."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds import make_config

from rlhf.data.model_files import load_tokenizer
from rlhf.run.teachers import Server

pytestmark = pytest.mark.stack

START_S = 600.0


@pytest.fixture
def endpoint(tiny_model_dir: Path, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--dtype", "float32", "--max-model-len", "128", "--enforce-eager", "--host", "127.0.0.1"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model_dir / "model")]
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = os.environ | small | {"TORCHDYNAMO_DISABLE": "1"}  # nothing is compiled, which would take longest
    log = (tmp_path / "server.log").open("wb")
    server = subprocess.Popen(
        [*command, *options, "--port", str(port)], env=environment, stdout=log, stderr=log, start_new_session=True
    )
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            assert server.poll() is None, (tmp_path / "server.log").read_text()[-4000:]
            assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield f"{address}/v1"
    finally:
        server.terminate()
        try:
            server.wait(30)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, 9)
            log.close()


def test_a_server_of_vllm_gives_the_log_probs_of_the_same_model_in_torch(tiny_model_dir: Path, endpoint: str) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(tiny_model_dir / "model", algo={"teacher": {"endpoint": endpoint, "timeout_s": 120}})
    tokenizer = load_tokenizer(config.model)
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, len(tokenizer), size).tolist() for size in (5, 40, 90)]  # bytes too, parts of characters

    async def ask() -> list[list[float]]:
        server = Server(config, endpoint, tokenizer)
        return list(await asyncio.gather(*map(server.logprobs, rows)))

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir / "model", dtype=torch.float32)
    for ids, given in zip(map(torch.tensor, rows), asyncio.run(ask()), strict=True):
        with torch.no_grad():
            expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert given[0] == 0.0
        np.testing.assert_allclose(given[1:], expected.numpy(), atol=1e-3)
