"""Tokens -> a tree; the grammar of answers.

answer    := relation ((`,` | `;` | and | or) relation)*
relation  := union (relop union)*                      also with nothing on the left: >= 5
union     := ratio ((cup | cap | setminus) ratio)*
ratio     := sum (: sum)* unit?
sum       := sign? product ((+ | - | ±) product)*
product   := factor ((* | / | mod)? factor | % | °)*           the operator may be left out
factor    := primary (^ | _ | ! | ')*
"""

from __future__ import annotations

from typing import NoReturn

from rlhf.rewards.answers.errors import UnsupportedError
from rlhf.rewards.answers.node import EULER, IMAGINARY, MONEY, Node, is_proper_fraction, mixed, number, numeral
from rlhf.rewards.answers.notation import CLOSING_COMMANDS, COMMANDS, SYMBOLS, function, matrix, power
from rlhf.rewards.answers.tokens import FUNCTIONS, Token, tokenize

END = Token("end", "", False)
MAX_DEPTH = 60  # nested brackets; each level takes about ten Python frames

CALLABLE_LETTERS = frozenset("fghFGHPQE")  # before a bracket, these are functions, not factors
IGNORED_COMMANDS = frozenset(["$", "angle", "triangle", "ce", "#", "therefore"])
MEASURES = {"pct": "percent", "degree": "degree"}  # bind weaker than a product: 33\\frac13\\% is 33 1/3 per cent


def parse(text: str, *, thousands: bool = True) -> Node:
    """The tree of a cleaned answer. Raises UnsupportedError for notation outside of the grammar."""
    return Parser(tokenize(text, thousands=thousands)).answer()


class Parser:
    def __init__(self, tokens: list[Token], depth: int = 0) -> None:
        self.tokens, self.position, self.depth = tokens, 0, depth
        self.bars = 0  # open |; the next | closes one
        self.colon_ends = False  # inside { x : ... } a colon is not a ratio

    @property
    def now(self) -> Token:
        return self.tokens[self.position] if self.position < len(self.tokens) else END

    def peek(self, ahead: int = 1) -> Token:
        return self.tokens[self.position + ahead] if self.position + ahead < len(self.tokens) else END

    def take(self) -> Token:
        token = self.now
        self.position += 1
        return token

    def at(self, kind: str, *values: str) -> bool:
        return self.now.kind == kind and (not values or self.now.value in values)

    def fail(self) -> NoReturn:
        raise UnsupportedError(f"at {self.now.value!r}")

    def answer(self) -> Node:
        node = self.listing()
        if not self.at("end"):
            self.fail()
        return node

    def listing(self) -> Node:
        """Items with separators between them; a single item is not a list."""
        items, joins = [], set()
        while True:
            while self.at("sep"):
                joins.add(self.take().value)
            closes = self.at("op", ")", "]", "}") or self.at("cmd", "}", "rangle", "mid")
            if closes or self.at("end") or (self.bars and self.at("op", "|")):
                break
            items.append(self.relation())
            if not self.at("sep"):
                break
        if not items:
            self.fail()
        return items[0] if len(items) == 1 else Node("list", tuple(items), "or" if "or" in joins else ",")

    def relation(self) -> Node:
        sides: list[Node] = []
        operators: list[str] = []
        while self.at("rel", "=", "~"):
            self.take()
        sides.append(Node("nothing") if self.at("rel") else self.union())
        while self.at("rel"):
            operators.append(self.take().value)
            sides.append(self.union())
        return sides[0] if not operators else Node("relation", tuple(sides), " ".join(operators))

    def union(self) -> Node:
        node = self.ratio()
        while self.at("cmd", "cup", "cap", "setminus", "backslash"):
            name = self.take().value
            node = Node("setop", (node, self.ratio()), name if name != "backslash" else "setminus")
        return node

    def ratio(self) -> Node:
        parts = [self.measured()]
        while self.at("op", ":") and not self.colon_ends:
            self.take()
            parts.append(self.measured())
        return parts[0] if len(parts) == 1 else Node("ratio", tuple(parts))

    def measured(self) -> Node:
        """A sum, prose, or a sum with a unit."""
        if self.at("text"):
            words = self.words()
            if self.at("end") or not self.starts_factor():
                return Node("text", name=words)
            return Node("worded", (self.measured(),), words)
        money = self.at("cmd", "$") and bool(self.take())
        node = self.sum()
        if self.at("text"):
            node = Node("unit", (node,), self.words())
        elif self.at("cmd", "pmod") and self.take():
            modulus = self.primary()
            if modulus.kind != "num":
                self.fail()
            node = Node("unit", (node,), f"mod {modulus.value}")
        money = money or (self.at("cmd", "$") and bool(self.take()))
        return Node("unit", (node,), MONEY) if money else node

    def words(self) -> str:
        """Words, with the powers of units: square m ^2."""
        words = [self.take().value]
        while True:
            if self.at("text") or (
                self.at("let") and self.now.spaced and len(words) > 0 and self.peek().kind == "text"
            ):
                words.append(self.take().value)
            elif self.at("op", "^") and self.peek().kind == "num":
                self.take()
                words.append("^" + self.take().value)
            else:
                return " ".join(words).replace(" ^", "^")

    def sum(self) -> Node:
        terms = [self.signed()]
        while self.at("op", "+", "-") or self.at("cmd", "pm", "mp"):
            sign = self.take().value
            term = self.product() if not self.at("op", "-", "+") else self.signed()
            terms.append(term if sign == "+" else Node("neg", (term,)) if sign == "-" else Node("pm", (term,), sign))
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def signed(self) -> Node:
        if self.at("op", "-", "+"):
            negative = self.take().value == "-"
            node = self.signed()
            if negative and node.kind in MEASURES.values():  # -5% is a percentage, not the opposite of one
                return Node(node.kind, (Node("neg", node.args),))
            return Node("neg", (node,)) if negative else node
        if self.at("cmd", "pm", "mp"):
            sign = self.take().value
            return Node("pm", (self.product(),), sign)
        return self.product()

    def product(self) -> Node:
        node = self.factor()
        while True:
            if self.at("op", "*") or self.at("cmd", "cdot", "times", "ast"):
                self.take()
                node = Node("mul", (node, self.signed_factor()))
            elif self.at("op", "/") or self.at("cmd", "div"):
                self.take()
                node = Node("div", (node, self.signed_factor()))
            elif self.at("cmd", *MEASURES):
                node = Node(MEASURES[self.take().value], (node,))
            elif self.at("cmd", "bmod", "mod"):
                self.take()
                node = Node("mod", (node, self.factor()))
            elif self.starts_factor() and not self.at("text"):
                before, right_is_number = self.tokens[self.position - 1], self.at("num")
                right = self.factor()
                if before.kind == "num" and right_is_number and node.kind == "num":
                    if not (right.kind == "num" and self.at("op", "/") and self.peek().kind == "num"):
                        self.fail()  # two numbers without an operator have no meaning
                    self.take()
                    node = mixed(node, Node("div", (right, self.factor())))
                elif before.kind == "num" and is_proper_fraction(right) and node.kind == "num":
                    node = mixed(node, right)
                else:
                    node = Node("mul", (node, right))
            else:
                return node

    def signed_factor(self) -> Node:
        if self.at("op", "-", "+"):
            return Node("neg", (self.signed_factor(),)) if self.take().value == "-" else self.signed_factor()
        return self.factor()

    def starts_factor(self) -> bool:
        kind, value, _ = self.now
        if kind in ("num", "let", "matrix"):
            return True
        if kind == "op":
            return value in ("(", "[", "{") or (value == "|" and not self.bars)
        return kind == "cmd" and value not in CLOSING_COMMANDS

    def factor(self) -> Node:
        """A primary with its powers, indices, factorials and primes."""
        node = self.primary()
        while True:
            if self.at("op", "^"):
                self.take()
                if self.at("op", "'"):
                    continue
                node = power(node, self.script())
            elif self.at("op", "_"):
                self.take()
                node = self.indexed(node)
            elif self.at("op", "!") and self.take():
                node = Node("call", (node,), "factorial")
            elif self.at("op", "'") and node.kind in ("sym", "pow", "call"):
                self.take()
                node = Node(node.kind, node.args, node.name + "'")
            else:
                return node

    def indexed(self, node: Node) -> Node:
        if node.kind == "num":
            digits = self.take().value if self.at("num") else self.raw_group()
            if not digits.isdigit() or node.value.denominator != 1 or len(digits) > 3:
                self.fail()
            return Node("base", (node, number(int(digits))))
        index = self.raw_group() if self.at("op", "{") else self.take().value
        if node.kind not in ("sym", "const"):
            self.fail()
        return Node("sym", name=f"{node.name}_{index}")

    def raw_group(self) -> str:
        """The tokens of {...} as one string, for an index."""
        if not self.at("op", "{"):
            self.fail()
        self.take()
        depth = 1
        parts: list[str] = []
        while not self.at("end"):
            token = self.take()
            depth += (token.value == "{") - (token.value == "}")
            if depth == 0:
                return "".join(parts)
            parts.append(token.value)
        self.fail()

    def script(self) -> Node:
        """An exponent: a group, or a sign and one primary."""
        if self.at("op", "-", "+"):
            return Node("neg", (self.script(),)) if self.take().value == "-" else self.script()
        node = self.primary()
        if self.at("op", "^"):
            self.take()
            return Node("pow", (node, self.script()))
        return node

    def primary(self) -> Node:
        kind, value, _ = self.now
        if kind == "num":
            self.take()
            return numeral(value)
        if kind == "let":
            return self.letter()
        if kind == "matrix":
            return matrix(self, self.take().value)
        if kind == "op" and value in ("(", "[", "{"):
            return self.group()
        if kind == "op" and value == "|":
            self.take()
            return self.bars_until("op", "|")
        if kind == "cmd":
            return self.command()
        self.fail()

    def letter(self) -> Node:
        name = self.take().value
        if name in CALLABLE_LETTERS and (label := self.function_of_a_letter(name)) is not None:
            return label
        return EULER if name == "e" else IMAGINARY if name == "i" else Node("sym", name=name)

    def function_of_a_letter(self, name: str) -> Node | None:
        """f(2), f'(2), f^{-1}(2) and P(A|B), whose inside is only a name; None if no bracket follows."""
        start = self.position
        while self.at("op", "'"):
            name += self.take().value
        if [self.peek(ahead).value for ahead in range(5)] == ["^", "{", "-", "1", "}"]:
            self.position += 5
            name += "^-1"
        if not self.at("op", "(") or self.now.spaced:
            self.position = start
            return None
        inside = self.position
        try:
            return Node("call", self.group(keep=True).args, f"?{name}")
        except UnsupportedError:
            self.position = inside + 1
        depth, words = 1, ""
        while depth and not self.at("end"):
            token = self.take()
            depth += (token.value == "(") - (token.value == ")")
            words += token.value
        return Node("call", (Node("sym", name=words),), f"?{name}")

    def group(self, *, keep: bool = False) -> Node:
        """(a), (a, b), [a, b), {a} and {a, b}."""
        opening = self.take().value
        inner = self.nested(opening)
        closing = self.take().value
        if closing not in ((")", "]") if opening in "([" else ("}",)):
            self.fail()
        items = inner.args if inner.kind == "list" and inner.name == "," else (inner,)
        if opening == "{":
            return inner if len(items) == 1 else Node("set", items)
        if len(items) == 1 and not keep and (opening + closing in ("()", "[]") or inner.kind == "matrix"):
            return inner
        return Node("group", items, opening + closing)

    def nested(self, opening: str) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnsupportedError("brackets too deep")
        bars, self.bars = self.bars, 0
        colon, self.colon_ends = self.colon_ends, False
        inner = self.listing()
        self.bars, self.colon_ends = bars, colon
        self.depth -= 1
        return inner

    def bars_until(self, kind: str, value: str) -> Node:
        self.bars += 1
        inner = self.sum()
        self.bars -= 1
        if not self.at(kind, value):
            self.fail()
        self.take()
        return Node("call", (inner,), "abs")

    def braced(self) -> Node:
        r"""\{a, b\}, or \{x : condition\}."""
        if self.at("cmd", "}"):
            self.take()
            return Node("set")
        self.depth += 1
        colon, self.colon_ends = self.colon_ends, True
        bars, self.bars = self.bars, 1
        inner = self.listing()
        self.bars = bars
        if self.at("op", ":", "|") or self.at("cmd", "mid"):
            self.take()
            condition = self.listing()
            inner = Node("builder", (inner, condition))
        self.colon_ends = colon
        self.depth -= 1
        if not self.at("cmd", "}"):
            self.fail()
        self.take()
        if inner.kind == "builder":
            return inner
        return Node("set", inner.args if inner.kind == "list" else (inner,))

    def argument(self) -> Node:
        """The argument of a LaTeX command: a group, one digit of a number, or one primary."""
        if self.at("num") and self.now.value.isdigit() and len(self.now.value) > 1:
            token = self.now
            self.tokens[self.position] = Token("num", token.value[1:], False)
            return numeral(token.value[0])
        return self.primary()

    def command(self) -> Node:
        name = self.take().value
        if name in IGNORED_COMMANDS:
            return self.primary()
        if name in COMMANDS:
            return COMMANDS[name](self)
        if name in FUNCTIONS:
            return function(self, name)
        if name in SYMBOLS:
            return Node("sym", name=name)
        self.position -= 1
        self.fail()

    def inner(self, text: str) -> Node:
        """The tree of a cell of a matrix."""
        return Parser(tokenize(text), self.depth + 1).answer()

    def expect(self, value: str) -> None:
        if not self.at("op", value):
            self.fail()
        self.take()
