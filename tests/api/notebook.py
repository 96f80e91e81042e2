"""Runs files of `# %%` cells in a real kernel, as a notebook does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from waiting import STACK_WAIT_S

LOOK_S = 0.1


def read_cells(file: Path) -> list[str]:
    """The code cells of a file; text cells are comments."""
    parts = re.split(r"^# %%(.*)\n", file.read_text(), flags=re.MULTILINE)[1:]
    return [code.strip() for kind, code in zip(parts[::2], parts[1::2], strict=True) if "markdown" not in kind]


def execute(cells: list[str], folder: Path, *, interrupt_when: Callable[[], bool] | None = None) -> list[str]:
    """Execute cells in a kernel that starts in `folder`; the text that each printed. The error of a cell is raised.

    `interrupt_when`: the kernel is interrupted, as its button does, when this is true.
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=STACK_WAIT_S, resources={"metadata": {"path": str(folder)}})

    async def run() -> None:
        executed = asyncio.ensure_future(client.async_execute())
        if interrupt_when is not None:
            while not (executed.done() or interrupt_when()):
                await asyncio.sleep(LOOK_S)
            if not executed.done():
                await client.km.interrupt_kernel()
        await executed

    asyncio.run(run())
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
