"""Virtual environments with packages that pin versions other than ours, made once per machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlhf-tests"


def python_with(*requirements: str) -> Path:
    """The interpreter of an environment with these packages, kept in the user's cache; skips without a registry."""
    pytest.importorskip("uv")
    key = hashlib.blake2b(f"{sys.version} {sorted(requirements)}".encode(), digest_size=4).hexdigest()
    folder = CACHE / f"{re.sub(r'[^a-z]+.*', '', requirements[0])}-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "packages.lock").open("w") as lock:  # several workers of pytest may want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            made = folder.with_suffix(".new")
            shutil.rmtree(made, ignore_errors=True)
            uv = [sys.executable, "-m", "uv", "--quiet"]
            subprocess.run([*uv, "venv", "--relocatable", "--python", sys.executable, made], check=True)
            install = [*uv, "pip", "install", "--compile-bytecode", "--python", made / "bin/python", *requirements]
            installed = subprocess.run(install, capture_output=True, text=True, check=False)
            if installed.returncode:
                pytest.skip(f"{requirements[0]} cannot be installed: {installed.stderr.strip()}")
            made.rename(folder)
    return folder / "bin/python"
