"""What vLLM's own processes (its core and its workers) run before they import vLLM: Python stops collecting garbage.

The collector would scan the modules that are being imported again and again, for a third of the time that `import vllm`
takes in each process. `weights.transfer.register_with_vllm` turns it on again.

And `ps` shows them as VLLM::EngineCore and VLLM::Worker, whatever the order of their environment: the place of a
process's title is looked up once, beside its first variable, and importing Ray moves one.
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
    """Let the processes that this one spawns, and those that they spawn, run this module first, not Ray's script."""
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(__name__)


def remove_shared_memory() -> None:
    """Wait until Python's tracker has removed what the ended children had in shared memory.

    It does so when this process ends, too, but Ray kills the children of an actor that ends, and comes first on a busy
    machine: 168 MB were left in /dev/shm.
    """
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
