"""Program: a checkpoint of a run as a model folder in Hugging Face format.

    python -m rlhf.export RUN[/checkpoints/step-000020 | /checkpoints/best] DIR [--merge] [--push-to-hub USER/NAME]

It needs only the checkpoint, and host memory for one file of the model (5 GB) and one tensor; neither DeepSpeed nor the
start model. The folder holds safetensors, config, tokenizer, and a model card that describes the run.

A checkpoint of a run with `model.lora` becomes an adapter in peft's format. With --merge it becomes a whole model: the
adapter is added to the weights of the start model, which is loaded whole, in float32, and the sum is rounded once.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config import cli
from rlhf.config.load import validated
from rlhf.config.model_folder import full_name
from rlhf.config.printing import say
from rlhf.config.references import from_environment, variables
from rlhf.config.reward_model import RECORD_FILE, RewardTrainingConfig

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.config.sections import ModelConfig


def main(argv: Sequence[str] | None = None) -> None:
    parser = cli.parser_of("rlhf.export", "Write a checkpoint as a model folder in Hugging Face format.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run (its newest checkpoint), or a checkpoint")
    parser.add_argument("folder", type=Path, metavar="DIR", help="new folder for the model")
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="also upload it, to a private repository")
    parser.add_argument("--merge", action="store_true", help="add an adapter to the weights: a whole model")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that the model's repository ships")
    arguments = parser.parse_args(argv)
    checkpoint = find_checkpoint(arguments.run)
    export(checkpoint, arguments.folder, trust_remote_code=arguments.trust_remote_code, merge=arguments.merge)
    run = arguments.run if (arguments.run / "checkpoints").is_dir() else arguments.run.parent.parent
    say(f"{checkpoint.name} of {run} is now the model {arguments.folder}")
    if arguments.push_to_hub is not None:
        push(arguments.folder, arguments.push_to_hub)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the newest undamaged one of a run."""
    from rlhf.run.checkpoint_files import BEST, MANIFEST, find_damage
    from rlhf.run.folder import RunFolder

    if (path / "checkpoints").is_dir():
        folder = RunFolder(path, resume=True)
        for warning in folder.warnings:
            say(f"warning: {warning}", file=sys.stderr)
        assert folder.restored is not None
        return folder.restored
    if path.name == BEST and path.is_file():
        path = path.with_name(path.read_text().strip())
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{path}: neither a run (no checkpoints/) nor a checkpoint (no {MANIFEST}). Name one of them.")
    if damage := find_damage(path):
        raise ValueError(f"{path}: {damage}. Name another checkpoint of the run.")
    return path.absolute()


def export(checkpoint: Path, folder: Path, *, trust_remote_code: bool, merge: bool = False) -> None:
    """Write the weights or the adapter in the type of the training, and the other files of a model folder.

    Raises:
        ValueError: the folder is not empty, the checkpoint is of another version, or it has no adapter to merge.
    """
    from rlhf.config.sections import ModelConfig
    from rlhf.learner.rank_checkpoint import MODEL_FOLDER
    from rlhf.run.checkpoint_files import MANIFEST, manifest_files
    from rlhf.run.folder import RunFolder
    from rlhf.run.model_card import model_card
    from rlhf.weights.adapter import write_adapter

    cli.check_new_folder(folder)
    state = RunFolder.read_state(checkpoint)
    is_reward_model = state.program == RewardTrainingConfig.program
    config = from_environment(state.config)
    here = {"path": state.base or config["model"]["path"], "trust_remote_code": trust_remote_code}
    model = validated(ModelConfig, config["model"] | here, section="model")
    if model.lora is not None and (unset := variables(model.path)):
        raise ValueError(f"model.path={model.path}: {', '.join(unset)} is not set. Set it to the run's start model.")
    if merge and model.lora is None:
        raise ValueError(f"--merge: {checkpoint} holds all weights, and no adapter to add to them. Leave it out.")
    start = state.models.get("learner", {})
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if model.lora is None:
            warning = _write_whole(partial, checkpoint, model, start, scalar=is_reward_model)
        elif merge:
            warning = _write_merged(partial, checkpoint, model, start)
        else:
            warning = write_adapter(partial, _adapter(checkpoint, model), model.lora, base=full_name(model.path))
        if warning:
            say(f"warning: {folder}: {warning}", file=sys.stderr)
        for file in manifest_files((checkpoint / MANIFEST).read_bytes()):
            folder_of_file, _, name = file.partition("/")
            of_base = name in ("config.json", "generation_config.json") and model.lora is not None and not merge
            if folder_of_file == MODEL_FOLDER and not of_base:
                (partial / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(checkpoint / file, partial / name)
        if is_reward_model:  # the scores of a checkpoint were never measured
            (partial / RECORD_FILE).write_text(json.dumps({"template": config["data"]["template"]}) + "\n")
        (partial / "README.md").write_text(model_card(state, merged=merge))
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_whole(folder: Path, checkpoint: Path, model: ModelConfig, start: Mapping[str, str], *, scalar: bool) -> str:
    from rlhf.learner.hub_format import empty_model, frozen_tensors, model_tensors, write_model
    from rlhf.learner.rank_checkpoint import MODEL_FOLDER, WEIGHTS, LearnerIndex, SliceReader, check_shapes

    index = LearnerIndex.read(checkpoint)
    transformer = empty_model(
        checkpoint / MODEL_FOLDER, dtype=model.dtype, trust_remote_code=model.trust_remote_code, scalar=scalar
    )
    tensors = model_tensors(transformer)
    check_shapes(checkpoint, index, {name: tensor.shape for name, tensor in tensors.items()})
    reader = SliceReader(checkpoint, WEIGHTS, ranks=range(index.ranks))
    stored = ((n, reader.read(n, 0, t.numel()).to(t.dtype).view(t.shape)) for n, t in tensors.items())
    frozen = frozen_tensors(transformer, tensors, model.path)
    if frozen:
        _check_start(model, start, "the checkpoint's other tensors are copied from the start model")
    return write_model(folder, transformer, tensors, stored, frozen=frozen)


def _adapter(checkpoint: Path, model: ModelConfig) -> dict[str, Tensor]:
    """The adapter of a checkpoint, in the type in which it was trained and served."""
    import torch

    from rlhf.learner.rank_checkpoint import WEIGHTS, LearnerIndex, SliceReader

    index = LearnerIndex.read(checkpoint)
    reader, dtype = SliceReader(checkpoint, WEIGHTS, ranks=range(index.ranks)), getattr(torch, model.dtype)
    return {n: reader.read(n, 0, math.prod(shape)).to(dtype).view(shape) for n, shape in index.shapes.items()}


def _check_start(model: ModelConfig, start: Mapping[str, str], why: str, *, remedy: str = "Put that one back.") -> None:
    """Raise a ValueError if model.path has changed since the run began; `start` is its fingerprint at that time."""
    from rlhf.data.model_files import model_fingerprint

    for part, digest in model_fingerprint(model.path).items():
        if start.get(part) and digest and digest != start[part]:
            raise ValueError(
                f"{why}: {model.path} is not the model that the run began with (fingerprint of its {part}: {digest}, "
                f"then {start[part]}). {remedy}"
            )


def _write_merged(folder: Path, checkpoint: Path, model: ModelConfig, start: Mapping[str, str]) -> str:
    """Write start model + adapter, and print how much of the change is lost by rounding."""
    from rlhf.algo.lora import A, B
    from rlhf.learner.hub_format import load_whole, model_tensors, write_model

    assert model.lora is not None
    _check_start(model, start, "--merge", remedy="Put that one back, or export the adapter alone.")
    transformer = load_whole(model)
    tensors, adapter = model_tensors(transformer), _adapter(checkpoint, model)
    lost = changed = 0.0
    for name, a in adapter.items():
        layer, _, kind = name.rpartition(".")
        if kind != A:
            continue
        weight = tensors[f"{layer}.weight"].detach()
        change = model.lora.scale * adapter[f"{layer}.{B}"].float() @ a.float()
        exact = weight.float() + change
        weight.copy_(exact)
        lost += float((weight.float() - exact).square().sum())
        changed += float(change.square().sum())
    warning = write_model(folder, transformer, tensors, iter(tensors.items()))
    share = (lost / changed) ** 0.5 if changed else 0.0
    say(f"merged in float32 and rounded to {model.dtype} once: the rounding is {share:.1%} of the adapter's change")
    return warning


def push(folder: Path, repository: str) -> None:
    """Upload a model folder; RuntimeError if the hub does not take it."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # the hub's client raises many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RuntimeError(
            f"--push-to-hub {repository}: {reason}. The model is complete in {folder}; log in (hf auth login) and "
            f"upload it with: hf upload {repository} {folder}"
        ) from None
    say(f"uploaded to {url}")


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
