"""Formulas in problem files: arithmetic of coordinates, parameters and known functions, and nothing else.

    Formula("exp(1j*k*x)", {"k": 3.0})(points)

A formula is parsed, never executed as Python: names, numbers, + - * / **, comparisons and calls of the functions below.
x, y, z are the coordinates, nx, ny, nz the outward normal (on a boundary), pi is pi.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from scanfield.errors import ArgumentError, ScanfieldError
from scanfield.pinn.extras import need

__all__ = ["FUNCTIONS", "Formula", "number"]

_COORDINATES, _NORMALS = ("x", "y", "z"), ("nx", "ny", "nz")
_LONGEST = 2000


def _special(name: str) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        return getattr(need("scipy.special"), name)(*arguments)

    return function


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(np, name)
        for name in ("sin", "cos", "tan", "exp", "log", "sqrt", "sinh", "cosh", "tanh", "arctan2")
    },
    **{name: getattr(np, name) for name in ("abs", "real", "imag", "conj", "where", "minimum", "maximum")},
    "jv": _special("jv"),
    "hankel1": _special("hankel1"),
}
# One argument more would be NumPy's `out`, and the formula would write into the points.
_ARGUMENTS = dict.fromkeys(("arctan2", "minimum", "maximum", "jv", "hankel1"), 2) | {"where": 3}
_BINARY: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type, Callable[..., Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Formula:
    """A formula of points (n, d), and of normals where there are any.

    Parameters
    ----------
    text
        The formula.
    parameters
        Names that stand for numbers.
    dimensions, boundary
        How many coordinates there are, and whether there are normals: no other name is taken.

    Raises `ArgumentError` for what is no formula, with the place in it.

    Examples
    --------
    >>> Formula("a*x**2 + 1", {"a": 2.0})(np.asarray([[0.0], [3.0]])).tolist()
    [1.0, 19.0]
    """

    def __init__(
        self,
        text: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        dimensions: int = 3,
        boundary: bool = True,
    ) -> None:
        self.text, self.parameters = text, dict(parameters or {})
        self._here = (*_COORDINATES[:dimensions], *(_NORMALS[:dimensions] if boundary else ()))
        if len(text) > _LONGEST:
            raise ArgumentError(f"formula of {len(text)} characters: at most {_LONGEST} are read")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # "1or 2" is doubtful Python, and no formula
                self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ArgumentError(f"formula {text!r:.80}: it cannot be read ({type(error).__name__})") from None
        self._names: set[str] = set()
        try:
            self._check(self._tree)
        except RecursionError:
            raise ArgumentError(f"formula {text!r:.80}: it is nested too deeply") from None
        # One that needs normals is called with them.
        self.__signature__ = _WITH_NORMALS if self._names & set(_NORMALS) else _WITHOUT

    def __call__(self, x: np.ndarray, normals: np.ndarray | None = None) -> np.ndarray:
        """Its values at points (n, d), (n,)."""
        names: dict[str, Any] = {"pi": np.pi, **self.parameters}
        names |= {name: x[:, i] for i, name in enumerate(_COORDINATES[: x.shape[1]])}
        if normals is not None:
            names |= {name: normals[:, i] for i, name in enumerate(_NORMALS[: x.shape[1]])}
        with np.errstate(all="ignore"):  # what is not finite is refused with its name where it is used
            try:
                found = np.asarray(self._value(self._tree, names))
            except ScanfieldError:  # it names the formula already
                raise
            except (ArithmeticError, TypeError, ValueError, RecursionError) as error:
                raise ArgumentError(f"formula {self.text!r:.80}: {error}") from None
        return np.array(np.broadcast_to(found, x.shape[:1]))

    def _check(self, node: ast.AST) -> None:
        children: list[Any] = []
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, complex):
            return
        if isinstance(node, ast.Name):
            self._names.add(node.id)
            if node.id not in {"pi", *self._here, *self.parameters}:
                place = node.id in (*_COORDINATES, *_NORMALS)
                words = f"there is no {node.id} here" if place else f"the name {node.id!r} is unknown"
                known = ", ".join(["pi", *self._here, *self.parameters])
                raise ArgumentError(f"formula {self.text!r:.80}: {words}; known are {known}")
            return
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            children = [node.left, node.right]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            children = [node.operand]
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            children = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            if node.func.id not in FUNCTIONS:
                raise ArgumentError(
                    f"formula {self.text!r:.80}: no function {node.func.id!r}; there are {', '.join(FUNCTIONS)}"
                )
            wanted = _ARGUMENTS.get(node.func.id, 1)
            if len(node.args) != wanted:
                raise ArgumentError(
                    f"formula {self.text!r:.80}: {node.func.id} takes {wanted} arguments, came {len(node.args)}"
                )
            children = list(node.args)
        else:
            raise ArgumentError(f"formula {self.text!r:.80}: {_advice(node)}")
        for child in children:
            self._check(child)

    def _value(self, node: Any, names: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            # Floats overflow where whole numbers would grow without end.
            return float(node.value) if isinstance(node.value, int) else node.value
        if isinstance(node, ast.Name):
            if node.id not in names:
                raise ArgumentError(f"formula {self.text!r:.80}: there is no {node.id} here")
            return names[node.id]
        if isinstance(node, ast.BinOp):
            return _BINARY[type(node.op)](self._value(node.left, names), self._value(node.right, names))
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, names)
            return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.Compare):
            compare = _COMPARISONS[type(node.ops[0])]
            return compare(self._value(node.left, names), self._value(node.comparators[0], names))
        return FUNCTIONS[node.func.id](*[self._value(argument, names) for argument in node.args])


def _advice(node: ast.AST) -> str:
    """What to write instead of what is no arithmetic."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        return "^ is no power here, write **"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name in FUNCTIONS:
            return f"functions have no prefix, write {name}(...)"
        return f"no function {name!r}; there are {', '.join(FUNCTIONS)}"
    return f"{type(node).__name__} is not arithmetic; allowed are + - * / **, < <= > >= and {', '.join(FUNCTIONS)}"


def _signature(with_normals: bool) -> Any:
    import inspect

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter(name, kind) for name in (("x", "normals") if with_normals else ("x",))]
    )


_WITH_NORMALS, _WITHOUT = _signature(True), _signature(False)


def number(value: Any, name: str, parameters: Mapping[str, Any]) -> float:
    """A number of a problem file: itself, or a formula of the parameters alone."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real | str):
        raise ArgumentError(f"{name} = {value!r:.80}: a number or a formula in quotes is expected")
    try:
        if isinstance(value, str):
            found = Formula(value, parameters, dimensions=0)(np.zeros((1, 0)))[0]
        else:
            found = float(value)
    except OverflowError:  # an integer
        raise ArgumentError(
            f"{name}: a whole number that no float holds, a finite real number is expected"
        ) from None
    if np.iscomplexobj(found) or not np.isfinite(found):
        raise ArgumentError(f"{name} = {value!r:.80}: it is {found}, a finite real number is expected")
    return float(found)
