r"""A formula copied from the problem into the box earns nothing; only a span that is the answer itself may."""

from __future__ import annotations

import random
from fractions import Fraction
from math import comb

import pytest

from rlhf.answers.clean import clean
from rlhf.answers.extract import MATH_SPAN
from rlhf.config.reward import MathOptions
from rlhf.rewards.math import math_reward


def problems(rng: random.Random) -> list[tuple[str, str]]:
    """One problem of each kind, as (statement, answer)."""
    a, b, c = rng.sample(range(2, 10), 3)
    n, k, m = rng.randrange(12, 40), rng.randrange(3, 6), rng.choice([2, 3, 5])
    ratio = Fraction(a, b) * Fraction(c, a + b)
    answer = f"\\frac{{{ratio.numerator}}}{{{ratio.denominator}}}"
    return [
        (rf"Compute $\dbinom{{{n}}}{{{k}}}$.", str(comb(n, k))),
        (rf"Evaluate $\left({a}^2 - {b}\right) + {c} \cdot {n}$ for $x = {n + 1}$.", str(a * a - b + c * n)),
        (rf"What is $\frac{{{a}}}{{{b}}} \cdot \frac{{{c}}}{{{a + b}}}$?", answer),
        (rf"If $\log_{{{m}}} y = {k}$, what is $y - 1$? Use $y = {m}^{{{k}}}$.", str(m**k - 1)),
        (rf"Find $\log_{{{m}}} {m**k}$.", str(k)),
        (rf"Let $|x - {a}| = {b}$ with $x > {a}$. Find the value of $\sqrt{{(x-{a})^2 + {b * b * 3}}}$.", str(2 * b)),
        (rf"Write $\sqrt{{{m * a * a}}} + {b}\sqrt{{{m}}}$ in its simplest form.", rf"{a + b}\sqrt{{{m}}}"),
        (rf"Solve ${a}x + {b} = {a * c + b}$.", f"x = {c}"),
        (rf"Solve $x^2 - {a + b}x + {a * b} = 0$ for $x > {max(a, b) - 1}$.", f"x={max(a, b)}"),
        (rf"Find all $x$ with $x^2 - {n}x < 0$.", f"(0,{n})"),
        (rf"For which $x$ is $|x| \le {n}$ and $x^2 \le {n * n}$?", f"[-{n},{n}]"),
        (rf"Expand and simplify $({a}x+{b}) - {c}(2x - {b})$.", f"{a - 2 * c}x + {b + b * c}"),
        (rf"Factor $x^2 + {a + b}x + {a * b}$.", f"(x+{a})(x+{b})"),
        (rf"Simplify $\frac{{({a}r^3)(r^4)}}{{r^2}}$.", f"{a}r^5"),
        (r"Simplify $\frac{\cos x}{1+\sin x} + \frac{1+\sin x}{\cos x}$.", r"2\sec x"),
        (rf"Compute $\cos {15 * k}^\circ \cos {15 * k}^\circ + \sin^2 {15 * k}^\circ$.", "1"),
        (rf"Evaluate $\lfloor {n}.{a} \rfloor$ and $\sum_{{i=1}}^{{{n}}} i$; give the sum.", str(n * (n + 1) // 2)),
        (rf"Compute $\int_0^{{{a}}} 2x\,dx$.", str(a * a)),
        (rf"Write ${n}_{{10}}$ in base 2.", f"{n:b}_2"),
        (rf"Evaluate $({a}+{b}i)^2$, with $i^2 = -1$.", f"{a * a - b * b}+{2 * a * b}i"),
        (rf"The number $0.{a}{b}$ is added to $0.{b}{a}$; what is $0.{a}{b}+0.{b}{a}$?", f"{(a + b) * 11 / 100:g}"),
        (rf"A car drives ${n}$ km in ${a}$ hours and ${n * a}$ km more. How far?", str(n + n * a)),
        (rf"How much is ${n} \times {a} \div {m} \times {m}$?", str(n * a)),
        (rf"Find $\gcd({a * n}, {b * n * a})$ if $\gcd({a}, {b}) = 1$.", str(a * n)),
        (r"Find the line through the zeros of $(y-2x-1)(y-2x-7)=0$ with $y(0)=1$.", "y=2x+1"),
    ]


def test_at_most_one_span_in_200_earns_reward_and_only_one_that_is_the_answer() -> None:
    rng, passed, count = random.Random(0), [], 0
    for _ in range(12):
        for statement, gold in problems(rng):
            for match in MATH_SPAN.finditer(statement):
                span = next(group for group in match.groups() if group is not None)
                count += 1
                if reward(span, gold) == 1.0:
                    passed.append((span, gold))
    assert [pair for pair in passed if clean(pair[0]) != clean(pair[1])] == []
    assert len(passed) <= count / 200
    assert count >= 400


FORMULAS = {  # by gold answer
    "5040": [r"2^{0+\log_2(7!)}"],
    "7": [r"2^{0+\log_2(3+4)}", r"4+\sqrt{9}"],
    "10": [r"10^{1+\sin 0}"],
    "243": ["3^{2+3}"],
    r"5\text{ m}": ["2m+3m", "(2+3)m"],
    r"5\text{ g}": [r"\binom{5}{4}g"],
    r"120\text{ m}": ["5! m"],
    r"\textbf{(C) } 42": ["40+2", r"6\cdot 7"],
    "C. 42": ["40+2", r"6\cdot 7"],
    "4": [r"\frac{5+\sqrt{9}}{2}", r"2^{\frac12}\cdot2^{\frac32}"],
    "3": [r"1+\sqrt[3]{8}"],
    "6": [r"2^{1/2}\cdot 18^{1/2}", r"2\sqrt{9}"],
    "-1": [r"e^{i\pi}"],
    "2": ["1+e^0", r"2^{1/3}\cdot 4^{1/3}", r"2^{1/2}\cdot 2^{1/3}\cdot 2^{1/6}", r"\sqrt{2}\cdot\sqrt[4]{4}"],
    "1": [r"e^{i\pi/3}+e^{-i\pi/3}", r"e^2\cdot e^{-2}", r"\frac{3}{\sqrt{9}}"],
    "8": [r"2^{\sqrt{9}}"],
    r"\sqrt{2}": [r"\frac{1}{\sqrt{2}}+\frac{\sqrt{2}}{2}"],
    "x^3": [r"x^{0+\log_2 8}", r"x^{\sqrt{9}}", "x^{2+1}"],
    "2x": [r"\sqrt{4}x", r"\binom{2}{1}x", r"x\gcd(4,6)"],
    "e^{3x}": ["e^{x}e^{2x}", "e^{x+2x}"],
    "x+1": [r"x+\sin^2 x+\cos^2 x", r"x+\log_2 2"],
    "x+5": [r"x+\lfloor 5.5\rfloor", r"x+\sqrt{25}", "x+2+3"],
}
NUMERALS = [
    (r"\frac{1+\sqrt5}{2}", r"\frac12+\frac{\sqrt5}{2}"),
    (r"\sqrt{12}", r"2\sqrt3"),
    ("1024", "2^{10}"),
    ("0.001", "10^{-3}"),
    (r"\pi/3", r"\frac{\pi}{3}"),
    ("-2i+3", "3-2i"),
    (r"\sqrt[3]{2}\sqrt{3}", r"\sqrt3\sqrt[3]{2}"),
    (r"\sqrt{8}", "2^{3/2}"),
    (r"(1+\sqrt2)\text{ m}", r"(1+\sqrt2)m"),
    (r"\textbf{(C) } 42", "42"),
    (r"x\ln 2", r"\frac{x\ln 4}{2}"),
    (r"\frac{1}{2}x^{-1/2}", r"\frac{1}{2\sqrt{x}}"),
]


def reward(answer: str, gold: str, prompt: str = "") -> float:
    return math_reward(rf"\boxed{{{answer}}}", gold, MathOptions(), prompt).value


@pytest.mark.parametrize(("answer", "gold"), [(answer, gold) for gold in FORMULAS for answer in FORMULAS[gold]])
def test_a_formula_for_the_answer_earns_nothing_in_any_notation(answer: str, gold: str) -> None:
    assert reward(answer, gold) == 0.0


@pytest.mark.parametrize(("gold", "answer"), NUMERALS)
def test_a_number_that_is_worked_out_earns_the_reward(gold: str, answer: str) -> None:
    assert reward(answer, gold) == 1.0


COPIED = [  # the prompt in three parts, of which the second is copied; the gold answer
    ("Express $", r"0.\overline{36}", "$ as a common fraction.", r"\frac{4}{11}"),
    ("Express $", r"0.\dot3\dot6", "$ as a common fraction.", r"\frac{4}{11}"),
    ("Expand $", "(2x-1)^3", "$.", "8x^3-12x^2+6x-1"),
    ("Expand $", "(x+3)(x-5)", "$.", "x^2-2x-15"),
    ("Expand $", "3(x+2)", "$.", "3x+6"),
    ("Expand $", "x(x-4)", "$.", "x^2-4x"),
    ("Multiply out $", "(a+b)(a-b)", "$.", "a^2-b^2"),
    ("Expand $", "-2y(3y-1)", "$.", "-6y^2+2y"),
    ("Simplify $", r"\frac{x^2-9}{x-3}", "$.", "x+3"),
    ("Simplify $", r"\frac{6x^3}{2x}", "$.", "3x^2"),
    ("Simplify $", r"\sqrt{72}", "$.", r"6\sqrt{2}"),
    ("Simplify $", r"\sqrt{12}+\sqrt{27}", "$.", r"5\sqrt{3}"),
    ("Simplify $", r"\sqrt[3]{54}", "$.", r"3\sqrt[3]{2}"),
    ("Simplify $", "(3a^2b)^2", "$.", "9a^4b^2"),
    ("Simplify $", r"x^5 \cdot x^{-2}", "$.", "x^3"),
    ("Simplify $", "2x+3x-x", "$.", "4x"),
    ("Simplify $", r"\frac{1}{x}+\frac{1}{y}", "$ to one fraction.", r"\frac{x+y}{xy}"),
    ("Simplify $", r"\frac{4+2\sqrt{3}}{2}", "$.", r"2+\sqrt{3}"),
    ("Simplify $", "i^{7}", "$.", "-i"),
    ("Simplify $", r"\log_2 32", "$.", "5"),
    ("Simplify $", r"e^{2\ln 3}", "$.", "9"),
    ("Rationalize the denominator of $", r"\frac{1}{\sqrt5-2}", "$.", r"\sqrt5+2"),
    ("Rationalize $", r"\frac{6}{\sqrt{3}}", "$.", r"2\sqrt{3}"),
    ("Rationalize $", r"\frac{1}{\sqrt{2}}", "$.", r"\frac{\sqrt{2}}{2}"),
    ("Reduce $", r"\frac{24}{36}", "$ to lowest terms.", r"\frac{2}{3}"),
    ("Reduce $", r"\frac{-18}{-48}", "$.", r"\frac{3}{8}"),
    ("Reduce the ratio $", "24:36", "$.", "2:3"),
    ("Convert $", r"45^\circ", "$ to radians.", r"\frac{\pi}{4}"),
    ("Convert $", r"\frac{3}{8}", "$ to a decimal.", "0.375"),
    ("Write $", "0.75", "$ as a common fraction.", r"\frac{3}{4}"),
    ("Convert $", "101101_2", "$ to base ten.", "45"),
    ("Convert $", r"2\frac{1}{3}", "$ to an improper fraction.", r"\frac{7}{3}"),
    ("Convert $", r"\frac{17}{5}", "$ to a mixed number.", r"3\frac{2}{5}"),
    ("Write $", r"37.5\%", "$ as a fraction.", r"\frac{3}{8}"),
    ("Convert ", "5 km", " to meters.", r"5000\text{ m}"),
    ("Write $", r"4.2\times 10^{-3}", "$ as a decimal.", "0.0042"),
    ("Divide: $", r"1147\div31", "$.", "37"),
    ("Divide: $", "1147/31", "$.", "37"),
    ("Divide $", r"\frac{x^2+5x+6}{x+2}", "$.", "x+3"),
    ("Divide $", r"\frac{3}{4}\div\frac{5}{6}", "$.", r"\frac{9}{10}"),
    ("Factor $", "x^2-5x+6", "$.", "(x-2)(x-3)"),
    ("Factor $", "2x^2+6x", "$ completely.", "2x(x+3)"),
    ("Complete the square: $", "x^2-6x+11", "$.", "(x-3)^2+2"),
    ("Write $", "2^{10}", "$ as an integer.", "1024"),
    ("Compute $", "|-17|", "$.", "17"),
    ("Evaluate $", r"\sqrt{1369}", "$.", "37"),
    ("Write $", "2x-y+3=0", "$ in slope-intercept form.", "y=2x+3"),
    ("Write $", r"1\tfrac{1}{4}", "$ as a decimal.", "1.25"),
    ("Solve $", "|x-2|<3", "$.", "(-1,5)"),
    ("Solve $", "2x+1>7", "$.", "x>3"),
]
NOT_WORKED_OUT = [  # (prompt, gold answer, answers with its value)
    ("Find the inverse of $y=2x+3$.", r"y=\frac{x-3}{2}", ["x=2y+3"]),
    ("Find the inverse of $f(x)=2x+3$.", r"f^{-1}(x)=\frac{x-3}{2}", ["x-3=2y"]),
    ("Expand $(2x-1)^3$.", "8x^3-12x^2+6x-1", ["(2x-1)(2x-1)^2", "-(1-2x)^3"]),
    ("Expand $(x+3)(x-5)$.", "x^2-2x-15", ["(x-5)(x+3)"]),
    ("Expand $3(x+2)$.", "3x+6", ["(x+2)3", r"3\cdot(2+x)"]),
    (r"Divide $1147 \div 31$.", "37", [r"\frac{1147}{31}", r"-\frac{-1147}{31}", r"\frac{1147}{31}\text{ units}"]),
    (r"Divide $1147 \div 31$.", "37", ["1147:31", r"1147\cdot\frac{1}{31}", r"1147\cdot 31^{-1}"]),
    (r"Divide $1147 \div 31$.", "37", [r"\left(\frac{31}{1147}\right)^{-1}", r"x=\frac{1147}{31}"]),
    (r"Evaluate $\sqrt{1369}$.", "37", ["1369^{1/2}", "1369^{0.5}"]),
    (r"Reduce $\frac{24}{36}$.", r"\frac{2}{3}", [r"\frac{12}{18}", "24:36", r"-\frac{-24}{36}"]),
    (r"Simplify $\frac{x^2-9}{x-3}$.", "x+3", ["(x^2-9)/(x-3)", r"\frac{9-x^2}{3-x}", "(x^2-9)(x-3)^{-1}"]),
    (r"Simplify $\frac{x^2-9}{x-3}$.", "x+3", [r"f(x)=\frac{x^2-9}{x-3}"]),
    (r"Simplify $\sqrt{72}$.", r"6\sqrt{2}", [r"\sqrt{36\cdot 2}", r"\sqrt{36}\sqrt{2}"]),
    (r"Compute $12\cdot 13$.", "156", [r"12\times 13", r"13\cdot 12", "12(13)"]),
    ("Compute $12+13$.", "25", ["13+12"]),
    ("Compute $50$ percent of $64$.", "32", [r"64\cdot 50\%", r"\frac{64}{2}"]),
]
NO_COPIES = [  # (prompt, answer, gold answer): the prompt has the gold answer's own form, or not this answer
    ("Tom has 12 apples and 1,200 pears.", "1200", "1200"),
    ("A shirt costs \\$25.00.", "25", "25"),
    (r"Which is largest, $\frac23$, $0.5$ or $\frac{3}{4}$?", r"\tfrac34", r"\frac{3}{4}"),
    (r"Where do $y=2x+3$ and $y=x$ meet?", "y=2x+3", "y = 3+2x"),
    ("There are twelve months.", r"\text{twelve}", "12"),
    ("Is it Tuesday or Friday?", r"\text{tuesday}", r"\text{Tuesday}"),
    (r"(A) $x^2-1$ (B) $x^2+1$", r"\text{(A) } x^2-1", "A"),
    (r"Expand $(x+1)^2$.", "1+2x+x^2", "x^2+2x+1"),
    ("It rains on 20% of the days.", r"20\%", "20"),
]


@pytest.mark.parametrize(("before", "copied", "after", "gold"), COPIED)
def test_copying_the_expression_of_the_prompt_earns_nothing_and_its_answer_does(
    before: str, copied: str, after: str, gold: str
) -> None:
    prompt = before + copied + after
    assert reward(copied, gold, prompt) == 0.0
    assert reward(gold, gold, prompt) == 1.0


@pytest.mark.parametrize(("prompt", "gold", "answers"), NOT_WORKED_OUT)
def test_another_spelling_of_what_the_prompt_asks_earns_nothing(prompt: str, gold: str, answers: list[str]) -> None:
    assert [answer for answer in answers if reward(answer, gold, prompt)] == []


@pytest.mark.parametrize(("prompt", "answer", "gold"), NO_COPIES)
def test_the_form_of_the_gold_answer_earns_the_reward_also_where_the_prompt_has_it(
    prompt: str, answer: str, gold: str
) -> None:
    assert reward(answer, gold, prompt) == 1.0


def test_evaluated_false_lets_copies_pass() -> None:
    options = MathOptions(evaluated=False)
    assert math_reward(r"\boxed{(2x-1)^2}", "4x^2-4x+1", options, "Expand $(2x-1)^2$.").value == 1.0
