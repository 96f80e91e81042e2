"""No answer is worth the reward for two different gold answers: 100,000 generated hedges."""

from __future__ import annotations

import random

import pytest

from rlhf.answers.compare import compare
from rlhf.config.reward import MathOptions
from rlhf.rewards.math import math_reward

pytestmark = pytest.mark.faults

HEDGES = 20_000  # of each seed
NUMBERS = [
    lambda rng: str(rng.randrange(-20, 400)),
    lambda rng: str(rng.randrange(1000, 99999)),
    lambda rng: f"{rng.randrange(0, 30)}.{rng.randrange(1, 99)}",
    lambda rng: rf"\frac{{{rng.randrange(1, 12)}}}{{{rng.randrange(2, 12)}}}",
    lambda rng: rf"{rng.randrange(2, 9)}\sqrt{{{rng.randrange(2, 20)}}}",
    lambda rng: rf"\frac{{{rng.choice((1, 5, 7))}\pi}}{{{rng.choice((2, 3, 6))}}}",
]


def number(rng: random.Random) -> str:
    return rng.choice(NUMBERS)(rng)


GOLDS = [
    *[number] * 6,
    lambda rng: f"({number(rng)}, {number(rng)})",
    lambda rng: f"{number(rng)}, {number(rng)}",
    lambda rng: rf"\{{{number(rng)}, {number(rng)}\}}",
    lambda rng: f"{rng.randrange(2, 9)}x + {rng.randrange(1, 9)}",
    lambda rng: f"x^2 - {rng.randrange(1, 9)}",
    lambda rng: f"y = {rng.randrange(2, 9)}x",
    lambda rng: f"x > {rng.randrange(1, 9)}",
    lambda rng: f"[{rng.randrange(0, 5)}, {rng.randrange(6, 9)}]",
    lambda rng: rf"\text{{{rng.choice(('Tuesday', 'Friday', 'red', 'blue', 'even', 'odd', 'yes', 'no'))}}}",
    lambda rng: rng.choice("ABCDE"),
    lambda rng: rf"{rng.randrange(2, 90)}\text{{ {rng.choice(('cm', 'm', 'hours', 'minutes', 'apples'))}}}",
]
JOINED_WRITTEN = r"""
    %a or %b;%a and %b;%a, %b;%a;%b;%a %b;%a,%b;%a.%b;%a/%b;%a:%b;%a = %b;%a \approx %b;%a (%b);%a (or %b);%a\ (%b)
    %a \text{ or } %b;%a \text{ and } %b;%a\text{ maybe }%b;%a\text{ not }%b;%a\text{ (not }%b\text{)};\{%a, %b\}
    (%a, %b);[%a, %b];x=%a, x=%b;x=%a\text{ or }x=%b;x = %a = %b;\text{%a or %b};\text{%a, or possibly %b}
    \text{%a but %b};\text{either %a or %b};\text{%a;alternatively %b};%a \pm %b;%a \mp %b;%a | %b;%a \cup %b
    %a \vee %b;%a \equiv %b;\begin{cases} %a \\ %b \end{cases};\begin{pmatrix} %a \\ %b \end{pmatrix};%a \quad %b
    %a \to %b;%a \implies %b;%a\\%b;%a \text{ since } %b;%a\text{ because not }%b;%a \text{ if } x>0, %b;%a^{%b}
    %a_{%b};\frac{%a}{%b};%a \in \{%a, %b\};\text{(A) } %a \text{ (B) } %b;x \in \{%a, %b\};%a\text{ over }%b
    %a\text{ in }%b;%a \% %b;%a\text{ (}%b\text{)};%a}\boxed{%b;%a} and \boxed{%b;%a}, \boxed{%b
    %a} or maybe \boxed{%b;%a}=\boxed{%b;%a} \approx \boxed{%b
"""
JOINED = [form for form in JOINED_WRITTEN.strip().replace(";", "\n").splitlines() if form.strip()]


@pytest.mark.parametrize("seed", range(5))
def test_no_hedge_is_right_for_two_gold_answers(seed: int) -> None:
    rng, count, both = random.Random(seed), 0, []
    options = {False: MathOptions(), True: MathOptions(mode="lenient")}
    while count < HEDGES:
        gold, other = rng.choice(GOLDS)(rng), rng.choice(GOLDS)(rng)
        if compare(gold, other) or compare(other, gold):
            continue
        for form in rng.sample(JOINED, 10):
            answer = form.strip().replace("%a", gold).replace("%b", other)
            lenient = rng.random() < 0.5
            count += 1
            if all(math_reward(rf"\boxed{{{answer}}}", g, options[lenient]).value == 1.0 for g in (gold, other)):
                both.append((answer, gold, other))
    assert both == []
