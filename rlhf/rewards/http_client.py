"""The HTTP client for judges, reward models, teachers and services. It runs in the driver and in rollout workers.

A server cannot hold a request, and gets no key but its own: a request has one time limit, a reply has a maximum length
and is not decompressed, and a redirect is an error. Proxies of the environment (`http_proxy`, `https_proxy`,
`no_proxy`) are used for other machines, never for this one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import socket
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from rlhf.config.printing import printable
from rlhf.config.secrets import hide, remember
from rlhf.processes.outside import over_clock
from rlhf.rewards.patience import patiently

CONNECT_S, CONNECT_SHARE = 30.0, 0.5  # limits for a connection: seconds, and share of the limit for a request
FIRST_WAIT_S = 0.5  # pause before the second try
MAX_RETRY_AFTER_S = 60.0  # longest pause that a server may ask for
MAX_REPLY_BYTES, MAX_SHOWN = 1 << 20, 1000  # largest reply; characters of a reply in a message
HERE = re.compile(r"(?:::ffff:)?(?:127[.0-9]+|0\.0\.0\.0)|::1?|(?:.+\.|ip6-)?localhost(?:\.localdomain)?")
PASSING = (408, 429)  # statuses below 500 after which another try may succeed
BAD_FORMS = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)

T = TypeVar("T")


class RequestError(RuntimeError):
    """A request failed, and another try would fail too."""


class PassingError(RequestError):
    """A request failed, but another try may succeed after `wait_s`."""

    wait_s = 0.0


class UnconnectedError(PassingError):
    """No connection was made, so the server has not seen the request."""


class LateError(PassingError):
    """The reply was not complete in time."""


class HttpClient:
    """Sends requests to one address; each request has its own connection.

    Args:
        section: section of the config, with its dot; `name` is the key in it that holds the address.
        address: a user and password in it are sent as basic authentication.
        timeout_s: limit for one request, from the connection to the end of the reply.
        retries: further tries after an error of the type `retry_on`.
        at_once: number of requests at the same time; others wait.
        key_variable_name: environment variable whose value is sent as a bearer token.

    Raises ValueError if the address is invalid, or the variable is not set.
    """

    def __init__(
        self,
        section: str,
        name: str,
        address: str,
        *,
        timeout_s: float,
        retries: int,
        at_once: int,
        key_variable_name: str | None = None,
        retry_on: type[PassingError] = PassingError,
    ) -> None:
        self._section, self._timeout_s, self._retries, self._retry_on = section, timeout_s, retries, retry_on
        self._slots = asyncio.Semaphore(at_once)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        credentials, is_address = "", False
        with contextlib.suppress(ValueError):
            parts = urlsplit(address)
            credentials, _, host = parts.netloc.rpartition("@")
            self._url = URL(parts._replace(netloc=host).geturl())
            is_address = self._url.scheme in ("http", "https") and bool(self._url.host) and not self._url.fragment
        if not is_address:
            shown = re.sub("//.*@", "//<secret>@", hide(address))  # a password with a "/" is not seen as one
            raise ValueError(f"{section}{name}={shown}: it is no address. Write one such as http://HOST:8000/v1.")
        self.name = hide(f"{section}{name}={self._url}")
        authorization = f"Basic {base64.b64encode(unquote(credentials).encode()).decode()}" if credentials else ""
        if key_variable_name is not None:
            authorization, reason = f"Bearer {os.environ.get(key_variable_name)}", ""
            if key_variable_name not in os.environ:
                reason = "this environment variable is not set. Set it where the run starts."
            elif not authorization.isprintable():
                reason = "its value has a line break or another unprintable character. Correct it."
            if reason:
                raise ValueError(f"{section}key_variable_name={key_variable_name}: {reason}")
        self._headers |= {"Authorization": authorization} if authorization else {}
        remember({"secret": [authorization.partition(" ")[2], unquote(credentials).partition(":")[2]]})

    async def ask(
        self, body: bytes | None, read: Callable[[bytes], T], *, path: str = "", most_bytes: int = MAX_REPLY_BYTES
    ) -> T:
        """POST this JSON, or GET if it is None, and return `read(reply)`. Raises RequestError if no try succeeded.

        A reply that `read` cannot read counts as a failed try.
        """

        async def attempt() -> T:
            async with self._slots:
                reply = await self._reply(body, self._url / path if path else self._url, most_bytes)
            try:
                return read(reply)
            except BAD_FORMS as error:
                said = f"{type(error).__name__}: {_beginning(str(error))}. The reply begins with {_beginning(reply)!r}"
                raise PassingError(said) from None

        try:
            return await patiently(
                attempt, retries=self._retries, first_wait_s=FIRST_WAIT_S, retry_on=(self._retry_on,)
            )
        except RequestError as error:
            said = f"{self.name}: {error}"
            if self._retries and isinstance(error, self._retry_on):
                remedy = f"See whether it runs; {self._section}timeout_s={self._timeout_s:g} bounds one request."
                said = f"{self.name}: {self._retries + 1} tries failed, the last with {error}. {remedy}"
            raise type(error)(printable(" ".join(hide(said).split()))) from None

    async def _reply(self, body: bytes | None, url: URL, most_bytes: int) -> bytes:
        connect_s = min(CONNECT_S, CONNECT_SHARE * self._timeout_s)  # tells apart a server that was not reached
        times = aiohttp.ClientTimeout(total=self._timeout_s, connect=connect_s)
        proxy = proxy_of(url)
        through = f" through the proxy {hide(proxy)}" if proxy else ""
        try:
            async with (
                aiohttp.ClientSession(timeout=times, auto_decompress=False) as session,
                session.request(
                    "GET" if body is None else "POST", url, data=body, headers=self._headers, proxy=proxy,
                    allow_redirects=False,
                ) as reply,
            ):  # fmt: skip
                text = bytearray()
                while len(text) <= most_bytes and (more := await reply.content.read(most_bytes + 1 - len(text))):
                    text += more
        except aiohttp.ConnectionTimeoutError:
            remedy = "See whether this machine can reach it"
            if connect_s < CONNECT_S:
                remedy += f"; a larger {self._section}timeout_s gives a connection more time"
            raise UnconnectedError(f"no connection{through} within {connect_s:g} seconds. {remedy}") from None
        except (aiohttp.ClientConnectorError, aiohttp.ClientHttpProxyError) as error:
            raise UnconnectedError(f"{type(error).__name__}{through}: {_beginning(str(error))}") from None
        except TimeoutError:
            raise LateError(f"{over_clock(self._timeout_s)} ({self._section}timeout_s){through}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
            raise PassingError(f"{type(error).__name__}{through}: {_beginning(reason)}") from None
        return _checked_body(reply, bytes(text), most_bytes)


def _beginning(text: bytes | str) -> str:
    """The beginning of a text for a message. Secrets are hidden before it is cut, so that no part of one remains."""
    return hide(text if isinstance(text, str) else text.decode(errors="replace"))[:MAX_SHOWN]


def _checked_body(reply: aiohttp.ClientResponse, text: bytes, most_bytes: int) -> bytes:
    """The text of a reply; RequestError if it has another status, is compressed, redirects or is too long."""
    status, coding = f"HTTP status {reply.status}", reply.headers.get("Content-Encoding", "")
    if 300 <= reply.status < 400 and "Location" in reply.headers:
        raise RequestError(f"{status}: it redirects to {_beginning(reply.headers['Location'])}, which is not asked")
    if not 200 <= reply.status < 300:
        passes = reply.status >= 500 or reply.status in PASSING
        error = (PassingError if passes else RequestError)(f"{status}: {_beginning(text)}")
        if isinstance(error, PassingError) and (after := reply.headers.get("Retry-After", "")).isdecimal():
            error.wait_s = min(float(after), MAX_RETRY_AFTER_S)
        raise error
    if coding.lower() not in ("", "identity"):
        raise RequestError(f"the reply is compressed ({_beginning(coding)}), which was not asked for")
    if len(text) > most_bytes:
        raise RequestError(f"the reply is too long: it has over {most_bytes} bytes")
    return text


def proxy_of(url: URL) -> str | None:
    """The proxy of the environment for an address; None for addresses and names of this machine."""
    host = (url.raw_host or "").rstrip(".").lower()
    with contextlib.suppress(OSError, ValueError):  # also for forms such as 127.1; names are not resolved
        family, *_, address = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)[0]
        host = str(address[0])
        with socket.socket(family) as trial:
            trial.bind(address)  # succeeds only for an address of this machine
            return None
    if HERE.fullmatch(host) or host == socket.gethostname().lower() or proxy_bypass(url.authority):
        return None
    proxy = getproxies().get(url.scheme)
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"
