"""Adds the configs and recipes to the package: they are installed in share/rlhf of an environment.

All else about the package stands in pyproject.toml, which cannot name a folder with all that is in it.
"""

from pathlib import Path

from setuptools import setup

FOLDERS = "configs", "recipes"
MADE = ".pyc", ".schema.json"  # endings of files that people's commands write there

files = (path for folder in FOLDERS for path in sorted(Path(folder).rglob("*")) if path.is_file())
shipped = [path for path in files if not path.name.endswith(MADE)]
setup(data_files=[(f"share/rlhf/{path.parent}", [str(path)]) for path in shipped])
