"""Reads the tests of a row into calls for the solution and values that the grader accepts; nothing here runs code.

For `assert f(2) == 4`, the solution's process is sent `f(2)`; 4 stays with the grader. A cell may hold:

    ["assert f(2) == 4", ...]                       MBPP; a text with such lines too
    "def check(candidate): assert candidate(2) ..."  HumanEval; the function is named by `check(f)` or by a column
    [{"input": "2\\n", "output": "4\\n"}, ...]        LiveCodeBench; with "testtype": "functional" the lines of the
                                                    input are arguments in JSON, and a column names the function
    {"inputs": [...], "outputs": [...]}              APPS, TACO; with "fn_name" the inputs are lists of arguments, and
                                                    an output may be a list with the result

or the JSON text of one of them.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

from rlhf.processes.attributes import as_json

BUILDERS: dict[str, Any] = {kind.__name__: kind for kind in (set, frozenset, list, tuple, dict, float, sorted)}
NUMBER = re.compile(  # as a program prints it; 007, 1_000, 0x10, nan and digits of other scripts are text
    r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,9})?"
)
DECIMALS = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
CONTEST_MODULES = (  # LiveCodeBench's grader imports these and their names before a program
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
TAGS = {"@int": "", "@tuple": "tuple", "@set": "set", "@frozenset": "set", "@dict": "dict"}  # of `as_json`: kinds
MAX_BYTES = 4096  # of a number or an error as JSON
FORMS = (
    "Write `assert f(arguments) == literal`, `assert [not] f(arguments)`, "
    "`assert abs(f(arguments) - number) < number`, `assert math.isclose(f(arguments), number)`, "
    "or pairs of input and output"
)


class CallTest(NamedTuple):
    """An expression for the solution, a check of its value, and the largest size of a right value in bytes.

    The value is JSON of `as_json`. It is never put into a set or dictionary: numbers of equal hashes would take hours.
    """

    call: str
    accepts: Callable[[Any], bool]
    max_bytes: int = MAX_BYTES


class ProgramTest(NamedTuple):
    """The input of a program, its expected output, and the tolerance of printed decimals."""

    stdin: str
    stdout: str
    tolerance: float = 0.0

    def accepts(self, printed: str) -> bool:
        """True if the lines have the same words; empty lines at the end do not count."""
        given, wanted = _words(printed), _words(self.stdout)
        return given == wanted or (
            [*map(len, given)] == [*map(len, wanted)]
            and all(map(self._same_word, (w for line in given for w in line), (w for line in wanted for w in line)))
        )

    def _same_word(self, given: str, wanted: str) -> bool:
        """True if two words are the same text or number. Integers of any size are compared exactly."""
        if given == wanted:
            return True
        if not (NUMBER.fullmatch(given) and NUMBER.fullmatch(wanted)):
            return False
        numbers, is_decimal = (Decimal(given), Decimal(wanted)), not wanted.lstrip("+-").isdigit()
        return numbers[0] == numbers[1] or (is_decimal and _near(*numbers, self.tolerance))


class Tests(NamedTuple):
    """The tests of a row, all of one kind."""

    calls: tuple[CallTest, ...] = ()
    programs: tuple[ProgramTest, ...] = ()
    functions: frozenset[str] = frozenset()  # names that the calls use
    setup: str = ""  # imports of the tests
    modules: tuple[str, ...] = ()  # modules that a program may use, with the names in them, without an import


@contextlib.contextmanager
def _integers_of_any_length() -> Iterator[None]:
    """Python refuses to read and write integers of more than 4300 digits; a test may have them."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(limit)


@_integers_of_any_length()
def read_tests(cell: Any, function: str = "", tolerance: float = 0.0) -> Tests:
    """Read the tests of a row.

    Args:
        cell: one of the forms in the module's docstring.
        function: the name of the tested function, where the cell does not say it.
        tolerance: absolute or relative error of a decimal that a program prints, or a function of a pair returns.

    Raises ValueError if the tests cannot be graded; it names the forms that can.
    """
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError:
            return _asserts(cell, function)
    if isinstance(cell, dict) and {"inputs", "outputs"} <= cell.keys():
        name = cell.get("fn_name") or ""
        pairs = zip(cell["inputs"], cell["outputs"], strict=True)
        cell = [{"input": given, "output": wanted, "fn_name": name, "wraps": True} for given, wanted in pairs]
    if isinstance(cell, list | tuple) and cell and all(isinstance(item, str) for item in cell):
        return _asserts("\n".join(cell), function)
    if isinstance(cell, list | tuple) and cell and all(isinstance(item, dict) for item in cell):
        return _pairs(cell, function, tolerance)
    raise ValueError(f"the tests are {str(cell)[:80]!r}: neither asserts nor pairs of input and output. {FORMS}.")


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().splitlines()]


def _near(value: Decimal, wanted: Decimal, tolerance: float) -> bool:
    """True if the absolute or the relative error is within the tolerance, as in judges of contests."""
    if not (tolerance and value.is_finite() and wanted.is_finite()):
        return False
    error = DECIMALS.subtract(value, wanted).copy_abs()
    return error <= DECIMALS.multiply(Decimal(repr(tolerance)), max(Decimal(1), wanted.copy_abs()))


# --- pairs ---


def _pairs(pairs: Sequence[dict[str, Any]], function: str, tolerance: float) -> Tests:
    if any(not {"input", "output"} <= pair.keys() for pair in pairs):
        raise ValueError(f"a test has the keys {sorted(pairs[0])}, without input or output. {FORMS}.")
    called = [pair for pair in pairs if pair.get("fn_name") or pair.get("testtype") == "functional"]
    if not called:
        texts = ((_text(pair["input"]), _text(pair["output"])) for pair in pairs)
        return Tests(programs=tuple(ProgramTest(*text, tolerance) for text in texts), modules=CONTEST_MODULES)
    if len(called) < len(pairs):
        raise ValueError("some tests call a function and others run a program. Keep one kind.")
    names = [pair.get("fn_name") or function for pair in pairs]
    calls = tuple(_call_of_pair(pair, name, tolerance) for pair, name in zip(pairs, names, strict=True))
    return Tests(calls=calls, functions=frozenset(names), modules=CONTEST_MODULES)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call_of_pair(pair: dict[str, Any], name: str, tolerance: float) -> CallTest:
    if not name.isidentifier():
        raise ValueError(f"the function to call is {name!r}, no name. Name the column that has it as `function`.")
    given, wanted = pair["input"], pair["output"]
    arguments = [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
    wanted = json.loads(wanted) if isinstance(wanted, str) and "testtype" in pair else wanted
    in_list = wanted if "wraps" in pair and isinstance(wanted, list) and len(wanted) == 1 else []
    right = [*map(_said, [wanted, *in_list])]
    called = f"(Solution().{name} if 'Solution' in globals() else {name})"
    call = f"{called}({', '.join(map(repr, arguments))})"
    return CallTest(call, lambda value: any(_same(value, one, tolerance) for one in right), _longest(*right))


def _same(value: Any, wanted: Any, tolerance: float | None = None) -> bool:
    """True if a value equals the wanted one, both as JSON of `as_json`.

    `tolerance`: of a test whose result is JSON. JSON has no tuples, so a function may return a tuple for a list. None
    compares the values as Python does.
    """
    (kind, given), (other, known) = _opened(value), _opened(wanted)
    if tolerance is not None and {kind, other} == {"list", "tuple"}:
        kind = other
    if kind != other or (kind and len(given) != len(known)):
        return False
    match kind:
        case "list" | "tuple":
            return all(map(_same, given, known, repeat(tolerance)))
        case "set":
            return sorted(map(_order, given)) == sorted(map(_order, known))
        case "dict":
            sides = (sorted(((_order(key), item) for key, item in side), key=itemgetter(0)) for side in (given, known))
            return all(key == same and _same(a, b, tolerance) for (key, a), (same, b) in zip(*sides, strict=True))
    if tolerance and isinstance(known, float) and isinstance(given, int | float) and abs(given) <= sys.float_info.max:
        return given == known or _near(Decimal(given), Decimal(known), tolerance)
    return bool(given == known)


def _opened(value: Any) -> tuple[str, Any]:
    """The kind and the items of a value from `as_json`; for a single value, an empty kind and the value."""
    if isinstance(value, list):
        return "list", value
    if not isinstance(value, dict):
        return "", value
    tag, items = next(iter(value.items()), ("", ""))
    if len(value) > 1 or tag not in TAGS:
        return "dict", [*value.items()]
    return TAGS[tag], int(items, 16) if tag == "@int" else items


def _order(value: Any) -> Any:
    """Sort key of elements and keys, equal only for equal ones."""
    kind, items = _opened(value)
    if kind:
        orders = map(_order, items)
        return kind, tuple(sorted(orders) if kind == "set" else orders)
    return "" if isinstance(items, int | float) else type(items).__name__, items


def _said(wanted: Any) -> Any:
    """A result as JSON of `as_json`; NaN, which equals nothing, if it has no such form."""
    try:
        return as_json(wanted)
    except TypeError:
        return math.nan


def _longest(*wanted: Any) -> int:
    """The largest size in bytes of a value that equals one of these: 1e300 may be an integer of 301 digits."""
    return MAX_BYTES + 64 * max(len(json.dumps(one)) for one in wanted)


# --- asserts ---


def _asserts(source: str, function: str) -> Tests:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are neither JSON nor Python ({error}). {FORMS}.") from None
    setup = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in body:
        match node:  # check(f)
            case ast.Expr(ast.Call(ast.Name("check"), [ast.Name(name)])):
                function = name
    tests = tuple(test for node in body for test in _tests_of(node, function))
    if not tests:
        raise ValueError(f"there is no test. {FORMS}.")
    names = {part.id for node in body for part in ast.walk(node) if isinstance(part, ast.Name)}
    return Tests(calls=tests, functions=frozenset(names - {"check"}), setup="\n".join(map(ast.unparse, setup)))


def _tests_of(node: ast.stmt, function: str) -> Iterator[CallTest]:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(ast.Constant() | ast.Call(ast.Name("check"))):
            return
        case ast.Assign([ast.Name("METADATA")]) | ast.Assert(ast.Constant(True)):
            return
        case ast.FunctionDef("check", ast.arguments(args=[ast.arg(candidate)])):
            if not function.isidentifier():
                raise ValueError(f"`check` gets {function!r}, no name. Name the column that has it as `function`.")
            for part in (part for part in ast.walk(node) if isinstance(part, ast.Name) and part.id == candidate):
                part.id = function
            for statement in node.body:
                yield from _tests_of(statement, function)
        case ast.Assert(test):
            yield _test(test)
        case _:
            raise _refused(node)


def _refused(node: ast.AST) -> ValueError:
    shown = ast.unparse(node)[:80]
    return ValueError(f"the test `{shown}` has no literal that a result can be compared with. {FORMS}.")


def _test(test: ast.expr) -> CallTest:
    """The test of `assert test`: a call, and the literal that never leaves the grader."""
    match test:
        case ast.Compare(left, [ast.Eq() | ast.Is() as operator], [right]):
            expression, literal = (right, left) if _is_literal(left) else (left, right)
            wanted = _literal(literal, test)
            call = _direct_call(expression, test) if isinstance(wanted, bool) else _asked(expression, test)
            known, is_same = _said(wanted), isinstance(operator, ast.Is)
            return CallTest(call, lambda value: value is wanted if is_same else _same(value, known), _longest(known))
        case ast.Compare(
            ast.Call(ast.Name("abs") | ast.Attribute(attr="fabs"), [ast.BinOp(left, ast.Sub(), right)]),
            [ast.Lt() | ast.LtE()],
            [bound],
        ):
            expression, known = (right, left) if _is_literal(left) else (left, right)
            return _close(_asked(expression, test), _literal(known, test), abs_tol=_literal(bound, test), rel_tol=0.0)
        case ast.Call(ast.Name("isclose") | ast.Attribute(ast.Name("math"), "isclose"), [left, right], keywords):
            expression, known = (right, left) if _is_literal(left) else (left, right)
            bounds = {str(keyword.arg): _literal(keyword.value, test) for keyword in keywords}
            return _close(_asked(expression, test), _literal(known, test), **bounds)
        case ast.UnaryOp(ast.Not(), ast.Call() as call):
            return CallTest(f"not {_direct_call(call, test)}", lambda value: value is True)
        case ast.Call():
            return CallTest(f"not {_direct_call(test, test)}", lambda value: value is False)
    raise _refused(test)


def _close(call: str, wanted: Any, *, rel_tol: Any = 1e-9, abs_tol: Any = 0.0) -> CallTest:
    if not all(isinstance(number, int | float) for number in (wanted, rel_tol, abs_tol)):
        raise ValueError(f"the test of `{call[:80]}` compares no numbers. {FORMS}.")

    def accepts(value: Any) -> bool:
        _, number = _opened(value)
        return isinstance(number, int | float) and math.isclose(number, wanted, rel_tol=rel_tol, abs_tol=abs_tol)

    return CallTest(call, accepts)


def _asked(node: ast.expr, test: ast.expr) -> str:
    """The expression for the solution: it must call something and compare nothing, since the grader compares."""
    kinds = {type(part) for part in ast.walk(node)}
    if ast.Call not in kinds or ast.Compare in kinds or _is_literal(node):
        raise _refused(test)
    return ast.unparse(node)


def _direct_call(node: ast.expr, test: ast.expr) -> str:
    """`f(literals)` or `Solution().f(literals)`: of `isclose(f(2), 4)` the solution would say that it is true."""
    match node:
        case ast.Call(ast.Name(name), arguments, keywords) if not hasattr(builtins, name):
            pass
        case ast.Call(ast.Attribute(ast.Call(ast.Name(), [], [])), arguments, keywords):
            pass
        case _:
            raise _refused(test)
    inner = [*arguments, *(keyword.value for keyword in keywords)]
    if any(isinstance(part, ast.Call) for argument in inner for part in ast.walk(argument)):
        raise _refused(test)
    return _asked(node, test)


def _is_literal(node: ast.expr) -> bool:
    try:
        _literal(node, node)
        return True
    except ValueError:
        return False


def _literal(node: ast.expr, test: ast.expr) -> Any:
    """The value of a literal, or of a set, list, float and the like of one."""
    try:
        match node:
            case ast.Call(ast.Name(name), arguments, []) if name in BUILDERS and len(arguments) <= 1:
                return BUILDERS[name](*(_literal(argument, test) for argument in arguments))
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise _refused(test) from None
