"""Program: a page that follows one or more runs while they go on, for a browser on this machine.

    python -m rlhf.watch runs/mine
    python -m rlhf.watch runs/k1 runs/k3 --port 8080

The page is that of rlhf.report: curves, diagnosis and rollouts, with what each run does and waits for. New steps appear
by themselves. A run may also begin later, be resumed, or have ended. Of the rollouts it has the newest steps;
rlhf.report has those of the whole run.

It only reads the run folders. The address holds a secret: whoever has it can read the runs. It works on this machine
alone, and over ssh with the line that is printed. Ctrl-C ends it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence

from rlhf.config.cli import parser_of, run_program
from rlhf.config.printing import say


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("rlhf.watch", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; the others are compared with the first")
    parser.add_argument("--port", type=int, default=0, help="port of the page (default: one that is free)")
    options = parser.parse_args(argv)
    from rlhf.report.live import LiveRuns
    from rlhf.report.server import LOOPBACK, WatchServer

    runs = LiveRuns(options.runs)
    try:
        server = WatchServer(runs, options.port)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port {options.port}: {error}. Name another port, or none.") from None
    with server, contextlib.suppress(KeyboardInterrupt):
        port = server.server_port
        say(server.address)
        say(f"from another machine: ssh -N -L {port}:{LOOPBACK}:{port} {socket.gethostname()}, then the same address")
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(run_program(main))
