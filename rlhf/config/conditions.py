"""Conditions on the keys of any config, written as text: evaluates tables of them, and makes the messages.

A condition is terms joined by ` and `, in alternatives joined by ` or `. A term is `KEY` (set and not false),
`KEY=a|b`, `KEY!=a|b`, `KEY>n`, `KEY>=n` or `KEY<n`. It may name a property of the config, which messages leave out.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.config.base import Section, short_value

TERM = re.compile(r"([\w.]+)(?:(!=|>=|=|>|<)(.+))?")
COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt}


def conflicts(config: Section, reasons: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """`KEY=VALUE with KEY=VALUE: REASON` for each condition of the table that holds.

    Args:
        reasons: condition without alternatives -> why it cannot be, and the remedy.
        prefix: of the keys in messages, such as `environment.`, where `config` is that section.
    """
    for condition, reason in reasons.items():
        terms = condition.split(" and ")
        if all([_holds(config, term) for term in terms]):  # a list: a misspelled key fails in every config
            keys = (_parts(term)[0] for term in terms)
            shown = [prefix + _shown(config, key) for key in keys if not _is_property(config, key)]
            yield f"{' with '.join(shown)}: {reason}"


def unread_keys(config: Section, read_if: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """A message for each key of the table that is set although its condition does not hold.

    Args:
        read_if: key -> the condition on which the program reads it.
        prefix: as for `conflicts`.
    """
    for key, condition in read_if.items():
        value = value_at(config, key)
        alternatives = [terms.split(" and ") for terms in condition.split(" or ")]
        is_read = any([all([_holds(config, term) for term in terms]) for terms in alternatives])
        section, name = _section_and_name(config, key)
        if section is None or is_read or value is False or value == type(section).model_fields[name].default:
            continue
        needed = " or ".join(" and ".join(prefix + term for term in terms) for terms in alternatives)
        reason = f"this key has no effect without {needed.replace('|', ' or ')}"
        yield f"{prefix}{_shown(config, key)}: {reason}. Add that setting, or remove the key."


def value_at(config: Section, key: str) -> Any:
    """The value of a key, or of a property; None in a section that is null."""
    value: Any = config
    for name in key.split("."):
        if value is not None:
            value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value


def _parts(term: str) -> tuple[str, str, str]:
    """Key, operator and right side of a term."""
    match = TERM.fullmatch(term)
    assert match is not None, term
    key, sign, wanted = match.groups("")
    return key, sign, wanted


def _holds(config: Section, term: str) -> bool:
    key, sign, wanted = _parts(term)
    value = value_at(config, key)
    if not sign:
        return bool(value)
    if sign in COMPARISONS:
        return value is not None and bool(COMPARISONS[sign](value, float(wanted)))
    return (short_value(value) in wanted.split("|")) == (sign == "=")


def _section_and_name(config: Section, key: str) -> tuple[Any, str]:
    section, _, name = key.rpartition(".")
    return (value_at(config, section) if section else config), name


def _is_property(config: Section, key: str) -> bool:
    section, name = _section_and_name(config, key)
    return isinstance(getattr(type(section), name, None), property)


def _shown(config: Section, key: str) -> str:
    """`KEY=VALUE`; of a whole section or a mapping its name alone."""
    value = value_at(config, key)
    return key if isinstance(value, Section | dict) else f"{key}={short_value(value)}"
