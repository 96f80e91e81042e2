"""Keeps secrets out of files and output.

Secrets are the values of environment variables and config keys with a name such as OPENAI_API_KEY or password, and the
password in an address: https://user:password@host. `config.yaml` names the environment variable in place of a value, so
that the same run can start from it again. Where no variable has the value, and everywhere else, `<secret>` stands for
it. The config of a program itself has the true values.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from rlhf.config.printing import WrappedStream
from rlhf.config.references import Reference, with_variables

HIDDEN = "<secret>"
# A word of a name; TOKEN is not a word of TOKENIZERS_PARALLELISM. The value of a name ending in _FILE is no secret.
NAME = re.compile(
    r"(?!.*_(?:path|file|dir|name)$).*(?:(?:(?<![a-z])|access|account|api|auth|pass|private|ssh)key|(?-i:Key)|token|secret"
    r"|password|passwd|passphrase|credential|authorization|(?<![a-z])pass)s?(?![a-z])",
    re.IGNORECASE,
)
# Keys of a config with such a word that are no secrets: kinds and numbers of tokens, data columns, pass rates.
PLAIN_NAME = re.compile(
    r"(?:(?:stop|end|eos|bos|pad|think|special|truncate|max|min|num|new|buffer|prompt|response|rollout)_)+tokens?(?:_ids?)?"
    r"|token_values|(?:\w+_)?tokens_per_\w+|tokens|keys"
    r"|(?:answer|prompt|response|label|gold|id|by|sort|column)_keys?|(?:min_|max_)?pass_(?:threshold|rate)"
)
PASSWORD = re.compile(r"secret|passw(?:or)?d|passphrase", re.IGNORECASE)  # may be digits only, a number in YAML
MIN_LENGTH = 8  # characters; replacing shorter values in a text would destroy other words of it
# Groups: what stays, and the secret. In http(s) a user name of 20 or more characters counts: https://TOKEN@github.com.
IN_ADDRESS = re.compile(
    r"(://(?:[^/\s:@]*:)?)((?<=:)(?<!://)[^/\s@]+(?=@)|(?:(?<=http://)|(?<=https://))[^/\s:@]{20,}(?=@))"
    r"|([?&][\w-]*(?:key|token|secret|password|signature)=)([^&#\s\"']+)",
    re.IGNORECASE,
)

DEFAULT = re.compile(r"(\$\{oc\.env:\w+),[^${}]*\}")  # of a variable that is not set

_of_config: set[str] = set()
_variables: set[str] = set()


def is_secret_name(name: str) -> bool:
    return NAME.match(name) is not None and not PLAIN_NAME.fullmatch(name)


def remember(values: Any, variables: Collection[str] = ()) -> None:
    """Keep the secrets of a config, and the variables it names, until this program ends, so that `hide` knows them."""
    secrets: list[str] = []
    _replaced(
        values, lambda text: secrets.extend(found[2] or found[4] for found in IN_ADDRESS.finditer(text)), secrets.append
    )
    _of_config.update(text for text in secrets if len(text) >= MIN_LENGTH)
    _variables.update(variables)


def hide(text: str) -> str:
    """The text with `<secret>` in place of every known secret and of the password in every address.

    The values of other variables that the config names become references to them, unless they are paths.
    """
    shown = {value: f"${{oc.env:{name}}}" for name in _variables if _is_replaced(value := os.environ.get(name, ""))}
    shown |= dict.fromkeys({*_of_config, *_of_environment()}, HIDDEN)
    for value in sorted(shown, key=len, reverse=True):
        text = text.replace(value, shown[value])
    return _hide_in_addresses(text)


def _is_replaced(value: str) -> bool:
    return len(value) >= MIN_LENGTH and not value.startswith(("/", "~", "."))


def hidden(values: Any) -> Any:
    """A config, or any JSON, with `<secret>` in place of every secret."""
    return _replaced(values, hide, lambda _: HIDDEN)


def with_references(values: Any) -> Any:
    """The stored form of a whole config: values and secrets from environment variables become references.

    Any other secret, and the default of a reference to a secret, becomes `<secret>`.
    """
    variables = {value: name for name, value in sorted(os.environ.items(), reverse=True)}

    def refer(text: str) -> str:
        text = text.replace("${", r"\${")  # text must not become a reference when it is read back
        for secret in sorted(_of_environment(), key=len, reverse=True):
            text = text.replace(secret, f"${{oc.env:{variables[secret]}}}")
        return _hide_in_addresses(text)

    def refer_or_hide(text: str) -> str:
        if text in variables:
            return f"${{oc.env:{variables[text]}}}"
        return refer(text) if any(secret in text for secret in _of_environment()) else HIDDEN

    return _replaced(with_variables(values), refer, refer_or_hide)


@contextlib.contextmanager
def hide_in_output() -> Iterator[None]:
    """A context in which this process prints no secret: its output may be a file."""
    hiding: Any = _Hiding(sys.stdout), _Hiding(sys.stderr)
    with contextlib.redirect_stdout(hiding[0]), contextlib.redirect_stderr(hiding[1]):
        yield


class _Hiding(WrappedStream):
    """A text stream whose `write` hides secrets."""

    def write(self, text: str) -> int:
        self._stream.write(hide(text))
        return len(text)


def _hide_in_addresses(text: str) -> str:
    def replacement(found: re.Match[str]) -> str:
        kept, secret = (found[1], found[2]) if found[2] else (found[3], found[4])
        return kept + (DEFAULT.sub(r"\1}", secret) if secret.startswith("${oc.env:") else HIDDEN)

    return IN_ADDRESS.sub(replacement, text) if "://" in text else text


def _of_environment() -> set[str]:
    return {value for name, value in os.environ.items() if len(value) >= MIN_LENGTH and is_secret_name(name)}


def _replaced(values: Any, text: Callable[[str], Any], secret: Callable[[str], Any]) -> Any:
    """The values with every text replaced: by `secret` below a key with the name of a secret, by `text` elsewhere."""
    if isinstance(values, Mapping):
        return {
            name: _replaced(_as_text(name, value), secret if is_secret_name(str(name)) else text, secret)
            for name, value in values.items()
        }
    if isinstance(values, list | tuple):
        return [_replaced(value, text, secret) for value in values]
    if isinstance(values, Reference):
        return _hide_in_addresses(DEFAULT.sub(r"\1}", values) if text == secret else str(values))
    return text(values) if isinstance(values, str) and values else values


def _as_text(name: Any, value: Any) -> Any:
    """A value of a config, with a password of digits, which YAML reads as a number, as text again."""
    is_password = type(value) is int and is_secret_name(str(name)) and PASSWORD.search(str(name))
    return str(value) if is_password else value
