"""The mutants of a source file, and a seeded draw of them that an edit elsewhere does not change.

A mutant is one small change of the text: another operator, a constant off by one, a condition turned round, a result
dropped, a slice without its end. Docstrings, annotations, error messages and whatever else stands in a `raise` are left
alone, and so are strings, which hold names and messages.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("scans", "pinn", "dispatch", "lrp")
ROOT = Path("src/scanfield")

_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: the characters `start:stop` of the file become `new`."""

    file: str
    start: int
    stop: int
    new: str
    line: int
    statement: int  # the line where its statement begins
    at_import: bool  # it stands in no body of a function
    kind: str
    place: str  # file, function, line and change: what tells it from others, whatever is edited elsewhere

    @property
    def name(self) -> str:
        return hashlib.sha256(self.place.encode()).hexdigest()[:10]

    def applied(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.stop :]


def draw(seed: int, number: int, root: Path = ROOT) -> list[Mutant]:
    """The first `number` mutants of this seed, from each package in turn.

    The order is that of a hash of the seed and the mutant, not of its position: code that changes takes its own
    mutants with it and leaves the rest of the draw as it was.
    """
    each = []
    for package in PACKAGES:
        found = [m for path in sorted((root / package).rglob("*.py")) for m in mutants(path, root)]
        each.append(sorted(found, key=lambda m: hashlib.sha256(f"{seed} {m.place}".encode()).digest()))
    longest = max(map(len, each), default=0)
    return [queue[i] for i in range(longest) for queue in each if i < len(queue)][:number]


def mutants(path: Path, root: Path = ROOT) -> list[Mutant]:
    """Every mutant of one file."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:  # the parser counts columns in bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    found: list[Mutant] = []
    seen: dict[str, int] = {}
    for where, statement, inside, node in _walk(ast.parse(text)):
        for start, stop, new, kind in _changes(node, text, span):
            line = text.count("\n", 0, start) + 1
            place = f"{path.relative_to(root)} {where} {lines[line - 1].strip()} {text[start:stop]} -> {new}"
            seen[place] = seen.get(place, 0) + 1  # the same change twice in a line: first, second
            place += f" {seen[place]}"
            found.append(
                Mutant(str(path), start, stop, new, line, min(statement, line), not inside, kind, place)
            )
    return found


def _walk(tree: ast.Module) -> Iterator[tuple[str, int, bool, ast.AST]]:
    """The nodes whose change can change a result, each with its function, its statement's line, whether in a body."""
    pending: list[tuple[str, int, bool, ast.AST]] = [("", 1, False, tree)]
    while pending:
        where, statement, inside, node = pending.pop()
        yield where, statement, inside, node
        named = f"{where}.{node.name}" if isinstance(node, ast.FunctionDef | ast.ClassDef) else where
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_params"):
                continue
            body = inside or (isinstance(node, ast.FunctionDef) and field == "body")
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or isinstance(
                    child, ast.Raise | ast.JoinedStr | ast.Assert
                ):
                    continue
                if (
                    isinstance(child, ast.BinOp)
                    and isinstance(child.op, ast.BitOr)
                    and _of_types(named, node)
                ):
                    continue
                line = child.lineno if isinstance(child, ast.stmt) else statement
                pending.append((named, line, body, child))


def _of_types(where: str, parent: ast.AST) -> bool:
    """Whether A | B below this node is a type: at the top of a module, or in isinstance(x, A | B)."""
    called = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name)
    return where == "" or (called and parent.func.id in ("isinstance", "issubclass", "cast"))


def _changes(node: ast.AST, text: str, span) -> Iterator[tuple[int, int, str, str]]:
    """The changes of one node itself: start, stop, new text, kind."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield _operator(node.op, span(node.left)[1], span(node.right)[0], text, "arithmetic")
    elif isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            left = node.left if i == 0 else node.comparators[i - 1]
            yield _operator(operator, span(left)[1], span(node.comparators[i])[0], text, "comparison")
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield _operator(node.op, span(left)[1], span(right)[0], text, "boolean")
    elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        yield _operator(node.op, span(node.target)[1], span(node.value)[0], text, "arithmetic")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        start, _ = span(node)
        turned = isinstance(node.op, ast.Not)
        yield (
            start,
            start + (3 if turned else 1),
            "   " if turned else " ",
            "boolean" if turned else "arithmetic",
        )
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        value = node.value
        if isinstance(value, bool):
            new = repr(not value)
        else:
            new = repr(value + 1 if isinstance(value, int) or value == 0 else 2 * value)
        yield *span(node), new, "constant"
    elif isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield *span(node.value), "None", "return"
    elif isinstance(node, ast.Slice):
        for end in (node.lower, node.upper):
            if end is not None and not (isinstance(end, ast.Constant) and end.value == 0):  # x[0:2] is x[:2]
                yield *span(end), "", "slice"
    if isinstance(node, ast.If | ast.IfExp | ast.While) and isinstance(
        node.test, ast.Name | ast.Call | ast.Attribute
    ):
        start, stop = span(node.test)
        yield start, stop, f"(not {text[start:stop]})", "boolean"


def _operator(operator: ast.AST, start: int, stop: int, text: str, kind: str) -> tuple[int, int, str, str]:
    """The change of an operator that stands somewhere between the ends of its operands, brackets and comments aside."""
    old, new = _OPERATORS[type(operator)]
    between = text[start:stop]
    if "#" in between:  # a comment between operands may hold the same characters
        between = "\n".join(line.split("#")[0].ljust(len(line)) for line in between.split("\n"))
    first = start + between.index(old) if " " not in old else start + between.index(old.split()[0])
    last = first + len(old)
    if old in ("is not", "not in"):  # their words may stand apart
        last = start + between.index(old.split()[1], first - start) + len(old.split()[1])
    return first, last, new, kind
