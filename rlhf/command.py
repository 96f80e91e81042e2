"""Program: `rlhf`, the command that starts the others; `rlhf grpo ...` is `python -m rlhf.grpo ...`.

    rlhf --help
    rlhf grpo --config configs/math.yaml --plan
    rlhf configs copy quickstart                       a config of this package as a file here
    rlhf configs schema                                JSON Schema next to it, with which an editor completes keys
    eval "$(rlhf completion bash)"                     Tab completes programs, flags and keys; also zsh and tcsh

No heavy package is imported before the requested program starts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import runpy
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from rlhf.config import cli
from rlhf.config.cli import PROGRAMS
from rlhf.config.printing import say

OTHERS = {
    "configs": "list the configs; copy one; schema for editors",
    "completion": "completion for a shell",
}
PACKAGES = ("report",)
SHELLS = ("bash", "zsh", "tcsh")

# Keys end in "=", after which bash must not put a space.
NO_SPACE_AFTER_KEYS = """
_rlhf() { _shtab_rlhf; [[ ${COMPREPLY[*]} == *= ]] && compopt -o nospace; }
complete -o filenames -F _rlhf rlhf
"""


def main(argv: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else list(argv)
    program, rest = _parser().parse_args(given[:1]).program, given[1:]
    if program == "configs":
        _configs(rest)
    elif program == "completion":
        shell = argparse.ArgumentParser(prog="rlhf completion", description="Print a script for a shell to evaluate.")
        shell.add_argument("shell", choices=SHELLS)
        say(completion(shell.parse_args(rest).shell))
    else:
        sys.argv[1:] = rest
        runpy.run_module(_module(program), run_name="__main__", alter_sys=True)


def _parser() -> argparse.ArgumentParser:
    texts = {name: program.text for name, program in PROGRAMS.items()} | OTHERS
    lines = (f"  {name:<12}  {text}" for name, text in texts.items())
    parser = argparse.ArgumentParser(
        prog="rlhf",
        usage="rlhf PROGRAM ...",
        description="\n".join(["Reinforcement learning of language models with GRPO and PPO.", "", *lines]),
        epilog="`rlhf PROGRAM --help` says what a program takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rlhf {version('rlhf')}")
    parser.add_argument("program", choices=(*PROGRAMS, *OTHERS), metavar="PROGRAM", help="one of the names above")
    return parser


def _module(program: str) -> str:
    return f"rlhf.{program.replace('-', '_')}"


def _configs(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="rlhf configs", description="List the configs of this package.")
    actions = parser.add_subparsers(dest="action")
    copy = actions.add_parser("copy", help="copy a config to a file here")
    copy.add_argument("name", metavar="NAME", help="such as quickstart")
    copy.add_argument("file", metavar="FILE", nargs="?", help="YAML file to write (default: NAME.yaml)")
    schema = actions.add_parser("schema", help="write JSON Schema, which the configs name, for editors")
    schema.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help="of the configs (default: this one)")
    arguments = parser.parse_args(argv)
    if arguments.action == "schema":
        _write_schemas(Path(arguments.folder))
        return
    files = {path.stem: path for path in sorted(cli.config_folder().glob("*.yaml"))}
    if arguments.action is None:
        say(f"{cli.config_folder()}:")
        for name, path in files.items():
            first = path.read_text().splitlines()[0].removeprefix("# ")
            say(f"  {name:<27} {textwrap.shorten(first, 50, placeholder=' ...')}")
        return
    name = arguments.name.removesuffix(".yaml")
    if name not in files:
        raise ValueError(f"configs copy {name}: there is no such config. There are {', '.join(files)}.")
    target = Path(arguments.file or f"{name}.yaml")
    if target.exists():
        raise ValueError(f"configs copy {name}: {target} exists. Name another file after it.")
    shutil.copyfile(files[name], target)
    say(f"{target}: edit it, then: rlhf grpo --config {target} --plan")
    say(f"rlhf configs schema {target.parent}: for an editor that checks its keys")


def _write_schemas(folder: Path) -> None:
    """One file for each program that has configs, replaced if it is there."""
    from rlhf.config.editor import editor_schema

    if not folder.is_dir():
        raise ValueError(f"configs schema {folder}: there is no such folder. Name the one in which the configs are.")
    for name, program in PROGRAMS.items():
        if program.config is not None:
            file = folder / f"{name}.schema.json"
            file.write_text(json.dumps(editor_schema(program.config), indent=1) + "\n")
            say(f"{file}: a config names it with  # yaml-language-server: $schema={file.name}")


def completion(shell: str) -> str:
    """A script that completes programs, their flags and, in bash, the keys of the config."""
    import shtab

    parser = argparse.ArgumentParser(prog="rlhf")
    programs = parser.add_subparsers()
    for name, program in PROGRAMS.items():
        built = parser_of(name)
        for action in built._actions:
            if action.dest == "overrides":
                action.choices = keys_of(name) if shell == "bash" else None
            elif action.metavar in ("FILE", "RUN", "DIR"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        programs.add_parser(name, help=program.text, parents=[built], add_help=False)
    configs = programs.add_parser("configs", help=OTHERS["configs"])  # shtab leaves out programs without help
    actions = configs.add_subparsers()
    schema = actions.add_parser("schema", help="JSON Schema for editors")
    schema.add_argument("folder", nargs="?").complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    copy = actions.add_parser("copy", help="copy a config to a file here")
    copy.add_argument("name", choices=[path.stem for path in sorted(cli.config_folder().glob("*.yaml"))])
    programs.add_parser("completion", help=OTHERS["completion"]).add_argument("shell", choices=SHELLS)
    script: str = shtab.complete(parser, shell=shell)
    return script + (NO_SPACE_AFTER_KEYS if shell == "bash" else "")


def keys_of(program: str) -> list[str]:
    """The keys that a program's help shows, without those inside lists, each as `section.key=`."""
    epilog = (parser_of(program).epilog or "").split(cli.REWARD_HEADER)[0]
    return [f"{key}=" for key in re.findall(r"^  ([\w.]+) (?:=|\(required\))", epilog, flags=re.MULTILINE)]


def parser_of(program: str) -> argparse.ArgumentParser:
    """The parser of a program, which is stopped where it is about to parse: before it does anything else."""
    built: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        built.append(parser)
        raise SystemExit

    module = importlib.import_module(_module(program) + (".__main__" if program in PACKAGES else ""))
    patched = mock.patch.multiple(argparse.ArgumentParser, parse_args=stop, parse_known_intermixed_args=stop)
    with patched, contextlib.suppress(SystemExit):
        module.main(["--config", "FILE"])
    return built[0]


def start() -> None:
    """The entry point of the installed command."""
    sys.exit(cli.run_program(main))


if __name__ == "__main__":
    start()
