"""Asks an outside service for any answer, before its own client would try for minutes."""

from __future__ import annotations

import http.client
import ssl
import threading
import urllib.error
import urllib.request

ANSWER_S = 10.0  # for any answer; wandb itself would wait 90 s, the hub's client about as long for each file


def connection_problem(url: str) -> str:
    """Why the server does not answer within ANSWER_S, name look-up included; empty if it answers at all."""
    reasons = [f"no answer within {ANSWER_S:.0f} s"]

    def ask() -> None:
        reason = ""
        try:
            urllib.request.urlopen(url, timeout=ANSWER_S).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(cause, TimeoutError):  # the reason is the same, whichever thread notices it first
                return
            if not isinstance(cause, ssl.SSLError):  # the service's client may know more certificates
                reason = str(cause) or type(cause).__name__
        reasons.append(reason)

    asking = threading.Thread(target=ask, daemon=True)  # a name look-up has no time limit of its own
    asking.start()
    asking.join(ANSWER_S)
    return reasons[-1]
