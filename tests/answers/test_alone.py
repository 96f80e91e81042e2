"""The package is used as its own docstring says, without the trainer."""

from __future__ import annotations

import doctest
import subprocess
import sys

import rlhf.answers

IMPORTS = "import sys, rlhf.answers.compare, rlhf.answers.extract; print(*sys.modules)"


def test_the_example_of_the_package_is_true() -> None:
    assert doctest.testmod(rlhf.answers) == doctest.TestResults(failed=0, attempted=4)


def test_the_package_imports_nothing_of_the_trainer() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert {name.split(".")[1] for name in done.stdout.split() if name.startswith("rlhf.")} == {"answers"}
