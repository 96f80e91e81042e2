"""The web server of `rlhf watch`: a read-only page on the loopback interface, which only its address opens.

Other users of the machine and pages in the same browser can reach the port. So every path begins with a random token,
and a request must name this machine as its host: a page of another site whose name was changed to 127.0.0.1 (DNS
rebinding) does not.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rlhf.report.live import LiveRuns
from rlhf.report.page import compressed, compressed_plotly, fill_page, page_program

LOOPBACK = "127.0.0.1"
HOSTS = {LOOPBACK, "localhost"}  # a forwarded port may have another number
IDLE_S = 60.0  # a connection without a request is closed
SECONDS_OF_A_DAY = 86_400


class WatchServer(ThreadingHTTPServer):
    """Serves the page of these runs at `address`."""

    daemon_threads = True

    def __init__(self, runs: LiveRuns, port: int = 0) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.runs, self.reading = runs, threading.Lock()
        self.token = secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, but not where a browser has closed a connection before its answer was complete."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")
        if (host[0] or host[2]) not in HOSTS:
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        parts = urlsplit(self.path)
        token, _, name = parts.path.removeprefix("/").partition("/")
        is_ours = hmac.compare_digest(token.encode(), self.server.token.encode()) and parts.path.count("/") > 1
        with self.server.reading:
            answer = self._answer(name, parse_qs(parts.query)) if is_ours else None
        if answer is None:
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            self._send(*answer)

    def _answer(self, name: str, query: dict[str, list[str]]) -> tuple[str, bytes, int] | None:
        """(content type, gzipped body, seconds that it may be kept); None for another path."""
        runs = self.server.runs
        match name:
            case "":
                return "text/html; charset=utf-8", _page(", ".join(runs.names)), 0
            case "plotly.js":
                return "text/javascript; charset=utf-8", compressed_plotly(), SECONDS_OF_A_DAY
            case "status":
                return _json(runs.status())
            case "metrics":
                return _json(runs.metrics())
            case "rollouts":
                after = query.get("after", [""])[0].split(",")
                return _json(runs.rollouts([int(step) for step in after if step.isdecimal()]))
        return None

    def _send(self, kind: str, body: bytes, kept_s: int) -> None:
        self.send_response(HTTPStatus.OK)
        cache_control = f"private, max-age={kept_s}, immutable" if kept_s else "no-store"
        for header in (("Content-Type", kind), ("Content-Encoding", "gzip"), ("Cache-Control", cache_control)):
            self.send_header(*header)
        self._end(body)

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self._end(b"")

    def _end(self, body: bytes) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "rlhf"

    def log_message(self, *_: Any) -> None:
        """The address is a secret, and the terminal is not for requests."""


def _json(value: Any) -> tuple[str, bytes, int]:
    return "application/json", compressed(json.dumps(value, ensure_ascii=False), level=1), 0


def _page(title: str) -> bytes:
    """The page without data: its program fetches them."""
    digest = base64.b64encode(hashlib.sha256(page_program().encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    return compressed(fill_page(policy, title, metrics="", rollouts="", plotly="", note=""))
