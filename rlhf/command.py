"""Program: `rlhf`, the command that starts the others; `rlhf grpo ...` is `python -m rlhf.grpo ...`.

    rlhf --help
    rlhf grpo --config configs/math.yaml --plan
    rlhf configs copy quickstart                       a config of this package as a file here
    rlhf configs schema                                JSON Schema next to it, with which an editor completes keys
    eval "$(rlhf completion)"                          Tab completes programs and keys in bash

No heavy package is imported before the requested program starts.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import rlhf
from rlhf.config import cli
from rlhf.config.cli import PROGRAMS
from rlhf.config.describe import describe_keys
from rlhf.config.printing import say

OTHERS = {
    "configs": "list the configs; copy one; schema for editors",
    "completion": "print a script with which bash completes keys",
}

COMPLETION = """\
_rlhf() {
    local words
    case "$COMP_CWORD ${COMP_WORDS[1]}" in
        "1 "*) words='%s' ;;
%s
    esac
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
    [[ ${COMPREPLY[*]} == *= ]] && compopt -o nospace
}
complete -o default -F _rlhf rlhf"""


def main(argv: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else list(argv)
    program, rest = _parser().parse_args(given[:1]).program, given[1:]
    if program == "configs":
        _configs(rest)
    elif program == "completion":
        shell = argparse.ArgumentParser(prog="rlhf completion", description="Print a script for bash to evaluate.")
        shell.add_argument("shell", nargs="?", choices=["bash"], help="the only shell that there is a script for")
        shell.parse_args(rest)
        say(completion())
    else:
        sys.argv[1:] = rest
        runpy.run_module(f"rlhf.{program.replace('-', '_')}", run_name="__main__", alter_sys=True)


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
    parser.add_argument("--version", action="version", version=f"rlhf {rlhf.__version__}")
    parser.add_argument("program", choices=(*PROGRAMS, *OTHERS), metavar="PROGRAM", help="one of the names above")
    return parser


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
    folder = cli.shipped_folder("configs")
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if arguments.action is None:
        say(f"{folder}:")
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
    """Write one schema for each program that has configs; existing files are replaced."""
    from rlhf.config.editor import editor_schema

    if not folder.is_dir():
        raise ValueError(f"configs schema {folder}: there is no such folder. Name the one in which the configs are.")
    for name, program in PROGRAMS.items():
        if program.config is not None:
            file = folder / f"{name}.schema.json"
            file.write_text(json.dumps(editor_schema(program.config), indent=1) + "\n")
            say(f"{file}: a config names it with  # yaml-language-server: $schema={file.name}")


def completion() -> str:
    """A script for bash that completes programs and the keys of their configs."""
    keys = {
        name: " ".join(f"{key.name}=" for key in describe_keys(program.config) if "[]" not in key.name)
        for name, program in PROGRAMS.items()
        if program.config is not None
    }
    cases = (f"        *' {name}') words='{words}' ;;" for name, words in keys.items())
    return COMPLETION % (" ".join((*PROGRAMS, *OTHERS)), "\n".join(cases))


def start() -> None:
    """The entry point of the installed command."""
    sys.exit(cli.run_program(main))


if __name__ == "__main__":
    start()
