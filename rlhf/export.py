"""Program: a checkpoint of a run as a model folder in Hugging Face format.

    python -m rlhf.export RUN[/checkpoints/step-000020 | /checkpoints/best] DIR [--push-to-hub USER/NAME]

It needs only the checkpoint, and host memory for one file of the model (5 GB) and one tensor; neither DeepSpeed nor the
start model. The folder holds safetensors, config, tokenizer, and a model card that describes the run.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.config import cli
from rlhf.config.printing import say
from rlhf.config.reward_model import RECORD_FILE, RewardTrainingConfig


def main(argv: Sequence[str] | None = None) -> None:
    parser = cli.parser_of("rlhf.export", "Write a checkpoint as a model folder in Hugging Face format.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run (its newest checkpoint), or a checkpoint")
    parser.add_argument("folder", type=Path, metavar="DIR", help="new folder for the model")
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="also upload it, to a private repository")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that the model's repository ships")
    arguments = parser.parse_args(argv)
    checkpoint = find_checkpoint(arguments.run)
    export(checkpoint, arguments.folder, trust_remote_code=arguments.trust_remote_code)
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


def export(checkpoint: Path, folder: Path, *, trust_remote_code: bool) -> None:
    """Write the model's weights in the type it was trained in, and the files that belong to them.

    Raises:
        ValueError: the folder is not empty, or the checkpoint is of another version.
    """
    from rlhf.learner.hub_format import empty_model, model_tensors, write_model
    from rlhf.learner.rank_checkpoint import MODEL_FOLDER, WEIGHTS, LearnerIndex, SliceReader, check_shapes
    from rlhf.run.checkpoint_files import MANIFEST, manifest_files
    from rlhf.run.folder import RunFolder
    from rlhf.run.model_card import model_card

    cli.check_new_folder(folder)
    state, index = RunFolder.read_state(checkpoint), LearnerIndex.read(checkpoint)
    is_reward_model = state.program == RewardTrainingConfig.program
    transformer = empty_model(
        checkpoint / MODEL_FOLDER, dtype=state.config["model"]["dtype"], trust_remote_code=trust_remote_code,
        scalar=is_reward_model,
    )  # fmt: skip
    tensors = model_tensors(transformer)
    check_shapes(checkpoint, index, {name: tensor.shape for name, tensor in tensors.items()})
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        reader = SliceReader(checkpoint, WEIGHTS, ranks=range(index.ranks))
        stored = ((n, reader.read(n, 0, t.numel()).to(t.dtype).view(t.shape)) for n, t in tensors.items())
        write_model(partial, transformer, tensors, stored)
        for file in manifest_files((checkpoint / MANIFEST).read_bytes()):
            if file.startswith(f"{MODEL_FOLDER}/"):
                shutil.copyfile(checkpoint / file, partial / Path(file).name)
        if is_reward_model:  # the scores of a checkpoint were never measured
            (partial / RECORD_FILE).write_text(json.dumps({"template": state.config["data"]["template"]}) + "\n")
        (partial / "README.md").write_text(model_card(state))
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


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
