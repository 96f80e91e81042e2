"""Type-checks the Python examples of docs/python.md, in one program, and the notebooks, with mypy --strict."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def main() -> int:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "python.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "python_page.py")
        page.write_text("\n".join(blocks))
        files = [page, *sorted(DOCS.glob("notebooks/*.py"))]
        return subprocess.run([sys.executable, "-m", "mypy", "--strict", *map(str, files)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
