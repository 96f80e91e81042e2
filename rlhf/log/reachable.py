"""Whether an outside service answers at all, before its own client tries for minutes."""

from __future__ import annotations

import http.client
import ssl
import threading
import urllib.error
import urllib.request

ANSWER_S = 10.0  # for any answer; wandb itself would wait 90 s, the hub's client about as long for each file


def no_answer(url: str) -> str:
    """Why the server does not answer within ANSWER_S, name look-up included; "" if it answers anything."""
    reasons = [f"no answer within {ANSWER_S:.0f} s"]

    def ask() -> None:
        reason = ""
        try:
            urllib.request.urlopen(url, timeout=ANSWER_S).close()
        except urllib.error.HTTPError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ssl.SSLError):  # its client may know certificates that Python does not
                reason = str(error.reason)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
        reasons.append(reason)

    asking = threading.Thread(target=ask, daemon=True)  # a name look-up has no time limit of its own
    asking.start()
    asking.join(ANSWER_S)
    return reasons[-1]
