"""Mutants of functions: what a small slip of whoever writes them would make of them.

A mutant differs in one place of one function's body: an operator (`<` for `<=`, `+` for `-`, `and` for `or`), a sign, a
number (one more), a truth value, a word, a function by another (`min` for `max`, `any` for `all`), a keyword that is
left out, a condition turned round, a call, a `raise` or a `return` that is not made.  What messages say is left as it
is: the text within `raise`, f-strings, strings of several words, docstrings.  So are annotations, defaults and what
modules and classes hold.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATIONS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.Div, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Mult,
}  # fmt: skip
TWINS = (
    ("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("minimum", "maximum"), ("any", "all"), ("sum", "mean"),
    ("floor", "ceil"), ("zeros_like", "ones_like"), ("new_zeros", "new_ones"), ("zeros", "ones"), ("sin", "cos"),
)  # fmt: skip
UNSEEN = {
    "device",
    "strict",
}  # keywords that no test on a CPU, or of lists that are as long as they should be, can miss
OTHER = {name: other for pair in TWINS for name, other in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    """One change of one function.

    Attributes:
        path: The file of the function.
        function: Its qualified name.
        first_line: Of the function, its decorators included.
        lines: Those of the statement that is changed, without the statements inside it.
        number: Which of the function's changes it is.
        change: What was there, and what is.
    """

    path: Path
    function: str
    first_line: int
    lines: range
    number: int
    change: str

    @property
    def name(self) -> str:
        """By which it is found again in the same source."""
        return f"{self.path.name}:{self.lines.start} {self.function} {self.change}"


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a file's functions."""
    found = []
    for name, function in _functions(ast.parse(path.read_text(encoding="utf-8")).body):
        first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
        for number, (node, new, statement) in enumerate(_changes(function)):
            change = f"{_text(node)} → {_text(new)}"
            found.append(Mutant(path, name, first, _lines(statement), number, change))
    return found


def code_of(mutant: Mutant) -> types.CodeType:
    """The mutant's function, compiled in its place."""
    tree = ast.parse(mutant.path.read_text(encoding="utf-8"))
    function = next(
        each for name, each in _functions(tree.body)
        if name == mutant.function and mutant.first_line <= each.lineno <= mutant.lines.start
        and each.end_lineno is not None and mutant.lines.start <= each.end_lineno
    )  # fmt: skip
    node, new, _ = next(change for number, change in enumerate(_changes(function)) if number == mutant.number)
    _Replacement(node, new).visit(function)
    code = compile(ast.fix_missing_locations(tree), str(mutant.path), "exec", dont_inherit=True)
    return next(
        each for each in _codes(code)
        if each.co_qualname == mutant.function and each.co_firstlineno == mutant.first_line
    )  # fmt: skip


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with their qualified names; those inside of functions belong to these."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")


def _lines(statement: ast.stmt) -> range:
    """Of a statement, without those inside it."""
    inside = [child.lineno for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    return range(statement.lineno, min(inside, default=(statement.end_lineno or 0) + 1))


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(ast.fix_missing_locations(node)).split())[:100]


def _changes(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, ast.AST, ast.stmt]]:
    """Every change of a function: a node, what takes its place, and the statement that it is in."""
    for statement in function.body:
        if not _is_text(statement):
            yield from _changes_below(statement, statement)


def _changes_below(node: ast.AST, statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.AST, ast.stmt]]:
    if isinstance(node, ast.stmt):
        statement = node
    for new in _variants(node):
        yield node, new, statement
    for child in _children(node):
        yield from _changes_below(child, statement)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What is changed inside of a node: no messages, annotations, defaults or names of types."""
    if isinstance(node, (ast.JoinedStr, ast.Raise)):
        return
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        yield from (each for each in (node.body if isinstance(node.body, list) else [node.body]) if not _is_text(each))
    elif isinstance(node, ast.AnnAssign):
        yield from () if node.value is None else (node.value,)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast":
        yield from node.args[1:]
    else:
        yield from ast.iter_child_nodes(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_message(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of one node."""
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                new = copy.copy(node)
                new.ops = [*node.ops[:place], COMPARISONS[type(operator)](), *node.ops[place + 1 :]]
                yield new
        case ast.BinOp() if type(node.op) in OPERATIONS and not (_is_message(node.left) or _is_message(node.right)):
            yield ast.BinOp(node.left, OPERATIONS[type(node.op)](), node.right)
        case ast.AugAssign() if type(node.op) in OPERATIONS:
            yield ast.AugAssign(node.target, OPERATIONS[type(node.op)](), node.value)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp():
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
        case ast.Constant(value=str()) if " " not in node.value:
            yield ast.Constant(f"{node.value}?")
        case ast.IfExp() | ast.If() | ast.While() if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            new = copy.copy(node)
            new.test = ast.UnaryOp(ast.Not(), node.test)
            yield new
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield ast.Pass()
        case ast.Return(value=ast.expr()) if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Call():
            yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[ast.Call]:
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in UNSEEN:
            yield ast.Call(node.func, node.args, node.keywords[:place] + node.keywords[place + 1 :])
    match node.func:
        case ast.Name(id=name) if name in OTHER:
            yield ast.Call(ast.Name(OTHER[name], ast.Load()), node.args, node.keywords)
        case ast.Attribute(attr=name) if name in OTHER:
            yield ast.Call(ast.Attribute(node.func.value, OTHER[name], ast.Load()), node.args, node.keywords)
