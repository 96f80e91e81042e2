"""Units of measure: their dimensions and sizes, in any spelling."""

from __future__ import annotations

import re
from fractions import Fraction

# dimension -> {names of a unit: its size in the base unit}
TABLE: dict[str, dict[str, Fraction | int | str]] = {
    "length": {
        "nanometer nanometre": "1/1000000000", "micrometer": "1/1000000", "mm millimeter millimetre 毫米 мм": "1/1000",
        "cm centimeter centimetre 厘米 公分 см": "1/100", "m meter metre 米 м": 1,
        "decimeter decimetre 分米": "1/10", "km kilometer kilometre 千米 公里 км": 1000,
        "in inch inche": "254/10000", "ft foot feet": "3048/10000",
        "yd yard": "9144/10000", "mi mile": "1609344/1000",
    },
    "time": {"microsecond": "1/1000000",
             "ms millisecond": "1/1000", "s sec second 秒": 1, "min minute 分钟 мин": 60,
             "h hr hour 小时 час": 3600, "day 天": 86400, "week wk": 604800},
    "months": {"month 个月": 1, "year yr": 12, "decade": 120, "century centurie": 1200},
    "mass": {"microgram": "1/1000000", "mg milligram 毫克 мг": "1/1000", "g gram gm 克 г": 1,
             "kg kilogram kilo 千克 公斤 кг": 1000, "t ton tonne 吨": 10**6},
    "weight": {"oz ounce": 1, "lb pound": 16},
    "volume": {"ml milliliter millilitre cc 毫升 мл": "1/1000", "l liter litre 升 л": 1},
    "capacity": {"cup": 1, "pint pt": 2, "quart qt": 4, "gallon gal": 16},
    "money": {"cent penny pennie": "1/100", "dollar 元": 1},
    "angle": {"rad radian": 1},
    "temperature C": {"celsius": 1}, "temperature F": {"fahrenheit": 1}, "temperature K": {"kelvin": 1},
    "speed": {"mph": 1},
    "force": {"n newton": 1}, "charge": {"c coulomb": 1}, "energy": {"j joule": 1, "kilojoule": 1000, "watthour": 3600},
    "atomic energy": {"ev electronvolt": 1}, "amount": {"mol mole": 1}, "pressure": {"pa pascal": 1},
    "power": {"w watt": 1, "kw kilowatt": 1000}, "frequency": {"hz hertz": 1},
    "voltage": {"v volt": 1}, "current": {"a ampere amp": 1},
    "resistance": {"ohm": 1, "kohm kiloohm kilohm": 1000},
    "morning": {"am": 1}, "afternoon": {"pm": 1},
}  # fmt: skip
UNITS = {
    name: (dimension, Fraction(size))
    for dimension, units in TABLE.items()
    for names, size in units.items()
    for name in names.split()
}
# Symbols with a prefix, as they are written; in lower case most of them are products of variables.
PREFIXES = {"k": Fraction(1000), "M": Fraction(10**6), "G": Fraction(10**9), "m": Fraction(1, 1000)}
WITH_PREFIX = {
    prefix + unit: (UNITS[word][0], UNITS[word][1] * size)
    for prefix, size in PREFIXES.items()
    for unit, word in {"N": "newton", "J": "joule", "W": "watt", "Hz": "hertz", "Pa": "pascal", "V": "volt",
                       "A": "ampere", "Wh": "watthour", "eV": "electronvolt", "mol": "mole"}.items()
} | {"nm": UNITS["nanometer"], "K": UNITS["kelvin"]}  # fmt: skip
COMPOUND = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "mps": "m/s", "sqft": "ft^2", "sqm": "m^2"}
SYMBOLS = frozenset(name for name in UNITS if len(name) <= 2) | {"min", "sec", "hr", "mph", "km", *COMPOUND}
# A number may be followed by one of these without a space: 12.5kg, 90km/h, 15cm^2
GLUED = "|".join(sorted(SYMBOLS - {"in", "a", "c", "k", "n", "t", "v"}, key=len, reverse=True))
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}


def unit_of(text: str) -> tuple[str, Fraction] | None:
    """Dimension and size of a unit, None if a word is not a measure: cm, square feet, m/s, m s^-2, cubic inches."""
    words = re.sub(r"\bcubed\b", "^3", re.sub(r"\bsquared\b", "^2", re.sub(r"\b[Pp]er\b", "/", text)))
    words = re.sub(r"\s*\^\s*(?:\{\s*(-?\d)\s*\}|(-?\d))", r"^\1\2", re.sub(r"\.(?!\d)", "", words)).strip()
    words = COMPOUND.get(words.lower(), words)
    powers: dict[str, int] = {}
    size = Fraction(1)
    for index, part in enumerate(words.split("/")):
        names = [part.strip()] if part.strip().lower() in UNITS else part.split()
        power = 1
        for name in names:
            if name.lower() in POWERS:
                power = POWERS[name.lower()]
                continue
            name, _, written = name.partition("^")
            base = _base_unit(name)
            if base is None or not re.fullmatch(r"(-?\d)?", written):
                return None
            exponent = (int(written) if written else power) * (-1 if index else 1)
            powers[base[0]] = powers.get(base[0], 0) + exponent
            size *= base[1] ** exponent
            power = 1
    return (" ".join(f"{name}^{powers[name]}" for name in sorted(powers)), size) if powers else None


def _base_unit(name: str) -> tuple[str, Fraction] | None:
    if name in WITH_PREFIX:
        return WITH_PREFIX[name]
    lower = name.lower()
    for candidate in (lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if candidate in UNITS:
            return UNITS[candidate]
    return None
