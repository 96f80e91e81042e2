"""The results of the last benchmarks as Markdown, for docs/records/performance.md.

python -m benchmarks.tables [FOLDER]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, place, shown


def markdown(result: dict[str, Any]) -> str:
    """One table, numbers to the right."""
    rows = result["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    numeric = [all(isinstance(row.get(c, 0), int | float) for row in rows) for c in columns]
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join("---:" if n else "---" for n in numeric) + "|"]
    lines += ["| " + " | ".join(shown(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        print(f"### {file.stem}\n\n{result['title']}; {place(result)}\n")
        print(markdown(result) + "\n")
        for note in result["notes"]:
            print(f"{note}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
