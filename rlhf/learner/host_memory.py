"""How much more host memory a process may take: what the machine has free, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

# By version: folder of the groups, file of the limit, file of the use, key in memory.stat of the reclaimable cache.
V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("", "memory.max", "memory.current", "inactive_file")


def free_host_memory(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes; a batch system or a container may allow less than the machine has."""
    return min([psutil.virtual_memory().available, *_left_in_groups(groups, own)])


def _left_in_groups(groups: Path, own: Path) -> Iterator[int]:
    lines = own.read_text().splitlines() if own.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, limit, used, cache = V1 if controllers else V2
        top = groups / mount
        inside = Path(path.lstrip("/"))
        # In a container the path may be that of the host; the top folder is then the container's own group.
        for folder in {top, *(top / part for part in (inside, *inside.parents))}:
            try:
                most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
                stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            if most != "max":
                yield int(most) - now + int(stat.get(cache, 0))
