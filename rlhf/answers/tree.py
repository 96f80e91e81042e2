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

from rlhf.answers.node import MONEY, Node, UnsupportedError, is_proper_fraction, mixed, numeral
from rlhf.answers.notation import COMMANDS, SYMBOLS, bars, function, indexed, letter, matrix
from rlhf.answers.tokens import FUNCTIONS, Token, tokenize

END = Token("end", "", False)
MAX_DEPTH = 60  # nested brackets; each level takes about ten Python frames

IGNORED_COMMANDS = frozenset(["$", "angle", "triangle", "ce", "#", "therefore"])
STARTING = ({*COMMANDS, *FUNCTIONS, *SYMBOLS} | IGNORED_COMMANDS) - {"$", "vert"}  # commands that begin a factor
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
        return self.peek(0)

    def peek(self, ahead: int = 1) -> Token:
        return self.tokens[self.position + ahead] if self.position + ahead < len(self.tokens) else END

    def take(self) -> Token:
        token = self.now
        self.position += 1
        return token

    def at(self, kind: str, *values: str) -> bool:
        return self.now.kind == kind and (not values or self.now.value in values)

    def accept(self, kind: str, *values: str) -> Token | None:
        """Take and return the next token if it has this kind and one of these values."""
        return self.take() if self.at(kind, *values) else None

    def expect(self, kind: str, *values: str) -> Token:
        return self.accept(kind, *values) or self.fail()

    def fail(self) -> NoReturn:
        raise UnsupportedError(f"at {self.now.value!r}")

    def answer(self) -> Node:
        node = self.listing()
        self.expect("end")
        return node

    def listing(self) -> Node:
        """Items with separators between them; a single item is not a list."""
        items, joins = [], set()
        while True:
            while separator := self.accept("sep"):
                joins.add(separator.value)
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
        while self.accept("rel", "=", "~"):
            pass
        sides = [Node("nothing") if self.at("rel") else self.union()]
        operators: list[str] = []
        while operator := self.accept("rel"):
            operators.append(operator.value)
            sides.append(self.union())
        return Node("relation", tuple(sides), " ".join(operators)) if operators else sides[0]

    def union(self) -> Node:
        node = self.ratio()
        while operator := self.accept("cmd", "cup", "cap", "setminus", "backslash"):
            node = Node("setop", (node, self.ratio()), operator.value.replace("backslash", "setminus"))
        return node

    def ratio(self) -> Node:
        parts = [self.measured()]
        while not self.colon_ends and self.accept("op", ":"):
            parts.append(self.measured())
        return parts[0] if len(parts) == 1 else Node("ratio", tuple(parts))

    def measured(self) -> Node:
        """A sum, prose, or a sum with a unit."""
        if self.at("text"):
            words = self.words()
            if self.at("end") or not self.starts_factor():
                return Node("text", name=words)
            return Node("worded", (self.measured(),), words)
        money = self.accept("cmd", "$")
        node = self.sum()
        if self.at("text"):
            node = Node("unit", (node,), self.words())
        elif self.accept("cmd", "pmod"):
            modulus = self.primary()
            if modulus.kind != "num":
                self.fail()
            node = Node("unit", (node,), f"mod {modulus.value}")
        money = money or self.accept("cmd", "$")
        return Node("unit", (node,), MONEY) if money else node

    def words(self) -> str:
        """Words, with the powers of units: square m ^2."""
        words = [self.take().value]
        while True:
            if self.at("text") or (self.at("let") and self.now.spaced and self.peek().kind == "text"):
                words.append(self.take().value)
            elif self.peek().kind == "num" and self.accept("op", "^"):
                words.append("^" + self.take().value)
            else:
                return " ".join(words).replace(" ^", "^")

    def sum(self) -> Node:
        terms = [self.signed()]
        while sign := self.sign():
            term = self.signed() if self.at("op", "-", "+") else self.product()
            terms.append(term if sign == "+" else Node("neg", (term,)) if sign == "-" else Node("pm", (term,), sign))
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def sign(self) -> str:
        """Take the next token if it is a sign; returns the sign or an empty string."""
        sign = self.accept("op", "+", "-") or self.accept("cmd", "pm", "mp")
        return sign.value if sign else ""

    def signed(self) -> Node:
        match self.sign():
            case "":
                return self.product()
            case "+":
                return self.signed()
            case "-":
                node = self.signed()
                if node.kind in MEASURES.values():  # -5% is a percentage, not the opposite of one
                    return Node(node.kind, (Node("neg", node.args),))
                return Node("neg", (node,))
            case sign:
                return Node("pm", (self.product(),), sign)

    def product(self) -> Node:
        node = self.factor()
        while True:
            if self.accept("op", "*"):
                node = Node("mul", (node, self.signed_factor()))
            elif self.accept("op", "/"):
                node = Node("div", (node, self.signed_factor()))
            elif measure := self.accept("cmd", *MEASURES):
                node = Node(MEASURES[measure.value], (node,))
            elif self.accept("cmd", "bmod"):
                node = Node("mod", (node, self.factor()))
            elif self.starts_factor():
                node = self.beside(node)
            else:
                return node

    def beside(self, node: Node) -> Node:
        """The product of a node and the factor right after it, or a mixed number."""
        follows_number = node.kind == "num" and self.tokens[self.position - 1].kind == "num"
        right_is_number = self.at("num")
        right = self.factor()
        if follows_number and right_is_number:
            if not (right.kind == "num" and self.peek().kind == "num" and self.accept("op", "/")):
                self.fail()  # two numbers without an operator have no meaning
            return mixed(node, Node("div", (right, self.factor())))
        return mixed(node, right) if follows_number and is_proper_fraction(right) else Node("mul", (node, right))

    def signed_factor(self) -> Node:
        if sign := self.accept("op", "-", "+"):
            return Node("neg", (self.signed_factor(),)) if sign.value == "-" else self.signed_factor()
        return self.factor()

    def starts_factor(self) -> bool:
        kind, value, _ = self.now
        if kind in ("num", "let", "matrix"):
            return True
        if kind == "op":
            return value in ("(", "[", "{") or (value == "|" and not self.bars)
        return kind == "cmd" and value in STARTING

    def factor(self) -> Node:
        """A primary with its powers, indices, factorials and primes."""
        node = self.primary()
        while True:
            if self.accept("op", "^"):
                if not self.at("op", "'"):
                    node = Node("pow", (node, self.script()))
            elif self.accept("op", "_"):
                node = indexed(self, node)
            elif self.accept("op", "!"):
                node = Node("call", (node,), "factorial")
            elif node.kind in ("sym", "pow", "call") and self.accept("op", "'"):
                node = Node(node.kind, node.args, node.name + "'")
            else:
                return node

    def script(self) -> Node:
        """An exponent: a group, or a sign and one primary."""
        if sign := self.accept("op", "-", "+"):
            return Node("neg", (self.script(),)) if sign.value == "-" else self.script()
        node = self.primary()
        return Node("pow", (node, self.script())) if self.accept("op", "^") else node

    def primary(self) -> Node:
        if self.at("op", "(", "[", "{"):
            return self.group()
        if digits := self.accept("num"):
            return numeral(digits.value)
        if source := self.accept("matrix"):
            return matrix(self, source.value)
        if name := self.accept("let"):
            return letter(self, name.value)
        if self.accept("op", "|"):
            return bars(self, "op", "|")
        if name := self.accept("cmd"):
            return self.command(name.value)
        self.fail()

    def group(self, *, keep: bool = False) -> Node:
        """(a), (a, b), [a, b), {a} and {a, b}."""
        opening = self.take().value
        inner = self.nested()
        closing = self.take().value
        if closing not in ((")", "]") if opening in "([" else ("}",)):
            self.fail()
        items = inner.args if inner.kind == "list" and inner.name == "," else (inner,)
        if opening == "{":
            return inner if len(items) == 1 else Node("set", items)
        if len(items) == 1 and not keep and (opening + closing in ("()", "[]") or inner.kind == "matrix"):
            return inner
        return Node("group", items, opening + closing)

    def nested(self, *, bars: int = 0, colon_ends: bool = False) -> Node:
        """The content of brackets: one item or a list."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnsupportedError("brackets too deep")
        outside = self.bars, self.colon_ends
        self.bars, self.colon_ends = bars, colon_ends
        inner = self.listing()
        self.bars, self.colon_ends = outside
        self.depth -= 1
        return inner

    def command(self, name: str) -> Node:
        if name in IGNORED_COMMANDS:
            return self.primary()
        if name in COMMANDS:
            return COMMANDS[name](self)
        if name in FUNCTIONS:
            return function(self, name)
        if name in SYMBOLS:
            return Node("sym", name=name)
        raise UnsupportedError(f"at {name!r}")
