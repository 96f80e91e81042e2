"""Code that vLLM's own processes (core and workers) run before they import vLLM: it stops garbage collection.

While vLLM is imported, the collector would scan the growing set of modules repeatedly, which takes a third of the
import's time. `weights.transfer.register_with_vllm` turns it on again.

It also lets `ps` show the processes as VLLM::EngineCore and VLLM::Worker: setproctitle looks up the memory of the title
once, next to the first environment variable, which the import of Ray would move.
"""

import contextlib
import gc
import importlib.util
import sys
from multiprocessing import resource_tracker

if __name__ == "__mp_main__":  # the name that multiprocessing gives to the main module of its parent
    gc.disable()
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()


def run_in_children() -> None:
    """Make all processes below this one run this module first, in place of Ray's script."""
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(__name__)


def remove_shared_memory() -> None:
    """Wait until Python's tracker has removed the shared memory of ended children.

    It would do so when this process ends, but on a busy machine Ray kills the tracker first: 168 MB stayed in /dev/shm.
    """
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
