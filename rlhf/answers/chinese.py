"""Chinese numerals -> digits: 一百二十 is 120, 5万 is 50000, 二分之一 is a half; units are kept, counters are not."""

from __future__ import annotations

import re
from decimal import Decimal

from rlhf.answers.units import UNITS

DIGITS = {character: value for value, character in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
SCALES = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}
NUMERAL = f"[{''.join([*DIGITS, *SCALES])}]{{1,20}}"
AMOUNT = r"\d[\d,]{0,20}(?:\.\d{1,20})?"
# The words right after a numeral that only count or measure; 三角形 is no number, and 千克 has no numeral
MEASURES = "[个元人名只头条本天年月日岁次支张块颗辆种件位棵分秒钟小时米克升度吨公厘毫平立方里道题组周台]"
WHOLE = re.compile(
    rf"(?P<sign>负)?(?:(?P<below>{NUMERAL})分之(?P<above>{NUMERAL})"
    rf"|(?P<scaled>{AMOUNT})\s*(?:(?P<scale>[十百千万亿]{{1,2}})(?![克米瓦卡]))?"
    rf"|(?P<whole>{NUMERAL}))(?P<measure>(?P<power>平方|立方)?(?P<unit>(?:千(?=[克米瓦卡]))?{MEASURES}*))[.。]?"
)


def in_digits(text: str) -> str:
    """The number that a text is, without its counter; the text itself if it is anything else."""
    match = WHOLE.fullmatch(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip())
    if match is None:
        return text
    if match["below"]:
        number = rf"\frac{{{_value(match['above'])}}}{{{_value(match['below'])}}}"
    elif match["scale"]:
        number = f"{Decimal(match['scaled'].replace(',', '')) * _value(match['scale']):f}"
    else:
        number = match["scaled"] or str(_value(match["whole"]))
    power = {"平方": "square ", "立方": "cubic "}.get(match["power"] or "", "")
    unit = f"\\text{{ {power}{match['unit']}}}" if match["unit"] in UNITS else ""
    return ("-" if match["sign"] else "") + number + unit


def _value(numeral: str) -> int:
    """Sections of up to 9999, each with its scale: 三万二千 is 3 * 10000 + 2 * 1000."""
    if not set(numeral) & set(SCALES):
        return int("".join(str(DIGITS[character]) for character in numeral))
    total = section = digit = 0
    for character in numeral:
        if character in DIGITS:
            digit = DIGITS[character]
        elif SCALES[character] < SCALES["万"]:
            section, digit = section + max(digit, 1) * SCALES[character], 0
        else:
            total, section, digit = (total + max(section + digit, 1)) * SCALES[character], 0, 0
    return total + section + digit
