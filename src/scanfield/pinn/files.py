"""Problems as TOML files, shipped or a user's own; `docs/pinn.md` shows one, `problems/` holds the shipped ones.

| table | keys |
|---|---|
| | `title`, and `[parameters]`: names for numbers, for use in formulas |
| `[problem]` | `wavenumber`, `source`, `exact`: numbers or formulas |
| `[solution]` | `kind`, a function of `scanfield.pinn.solutions`, and its arguments: instead of `exact` |
| `[domain]` | `kind` = interval, box, disk, ball and their arguments; `hole` = the same again |
| `[[boundary]]` | `kind` = dirichlet, neumann, robin, impedance, sommerfeld, periodic, interface, pml, their arguments |
| `[network]` | `features`, `scale` (cycles per length) or `wavenumber`, `trainable`, `hidden`, `activation`, `seed` |
| `[training]` | arguments of `train`: `points`, `boundary`, `sampling`, `seed`, `optimizer`, `iterations`, ... |

`kind` = "manufactured" takes `function` = "sin" or "cos". A boundary `value` may be "solution.value", "solution.normal" or
"solution.impedance", boundary data of the known field; `wavenumber` and `source` may be "solution.wavenumber" and
"solution.source".
"""

from __future__ import annotations

import inspect
import itertools
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from scanfield.advice import shown
from scanfield.arrays import Namespace
from scanfield.errors import ArgumentError, ScanfieldError
from scanfield.pinn import boundary as conditions
from scanfield.pinn import solutions
from scanfield.pinn.absorbing import PML
from scanfield.pinn.compound import Difference
from scanfield.pinn.domains import Ball, Box, Disk, Domain, Interval
from scanfield.pinn.fit import Fit
from scanfield.pinn.formula import Formula, number
from scanfield.pinn.fourier import FourierFeatures, check_count
from scanfield.pinn.network import Network
from scanfield.pinn.problem import Helmholtz
from scanfield.pinn.train import check_settings, train
from scanfield.pinn.values import evaluate

__all__ = ["ProblemFile", "load_problem", "shipped", "source", "title"]

_DOMAINS: dict[str, Callable[..., Domain]] = {"interval": Interval, "box": Box, "disk": Disk, "ball": Ball}
_CONDITIONS: dict[str, Callable[..., Any]] = {
    "dirichlet": conditions.Dirichlet,
    "neumann": conditions.Neumann,
    "robin": conditions.Robin,
    "impedance": conditions.Impedance,
    "sommerfeld": conditions.Sommerfeld,
    "periodic": conditions.Periodic,
    "interface": conditions.Interface,
    "pml": PML,
}


def _manufactured(wavenumber: float, a: list[float], function: str = "sin") -> solutions.Solution:
    """In a file `kind` is the solution's own."""
    if function not in ("sin", "cos"):
        raise ArgumentError(f"[solution] function = {shown(function)}: allowed are 'sin' and 'cos'")
    return solutions.manufactured(wavenumber, a, function)


_SOLUTIONS: dict[str, Callable[..., solutions.Solution]] = {
    name: getattr(solutions, name) for name in solutions.__all__ if name != "Solution"
} | {"manufactured": _manufactured}
_DATA = ("value", "normal", "impedance")
_NETWORK = ("features", "scale", "wavenumber", "trainable", "hidden", "activation", "seed")
_TAKEN = ("x", "y", "z", "nx", "ny", "nz", "pi")
_LARGEST_FILE = 65_536  # bytes
_LONGEST_WORDS = 1000
_MOST_DOTS = 200  # of a line
_MOST_PARAMETERS = 20_000_000  # of a network, drawn when the file is read
_MOST_POINTS = 10_000_000
_TABLES = ("title", "parameters", "problem", "solution", "domain", "boundary", "network", "training")


@dataclass(frozen=True)
class ProblemFile:
    """A problem with the network and the training that its file states."""

    name: str
    title: str
    problem: Helmholtz
    exact: Callable[[np.ndarray], np.ndarray] | None
    features: Mapping[str, Any]
    network: Mapping[str, Any]
    training: Mapping[str, Any]

    def make_network(self, xp: Namespace = np, dtype: str = "float64", device: Any = None) -> Network:
        """The network before training, drawn from the seed, k and the feature scale of the file."""
        embedding = FourierFeatures(self.problem.dimensions, **self.features)
        return Network.create(
            embedding, outputs=self.problem.outputs, xp=xp, dtype=dtype, device=device, **self.network
        )

    def solve(self, network: Network | None = None, **training: Any) -> Fit:
        """Train a network as the file says; keywords replace what it says."""
        return train(
            self.problem,
            self.make_network() if network is None else network,
            **(dict(self.training) | training),
        )


def shipped() -> list[str]:
    """Names of the problems that come with scanfield.

    >>> "square-1-4" in shipped()
    True
    """
    return sorted(
        path.name.removesuffix(".toml") for path in _folder().iterdir() if path.name.endswith(".toml")
    )


def load_problem(name: str | os.PathLike[str], **parameters: float) -> ProblemFile:
    """A problem by the name of a shipped one or the path of a TOML file; keywords replace its parameters.

    Raises `ArgumentError`, naming the file and the entry, for what it does not understand.

    Examples
    --------
    >>> load_problem("square-1-4", a1=2.5, a2=3.3).problem.outputs
    1
    """
    text, called = _text(name)
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also of an integer of more than 4,300 digits
        raise ArgumentError(_plain(f"{called}: not TOML ({error})")) from None
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused with its name where it is used
            return _made(called, tables, parameters)
    except ScanfieldError as error:
        raise type(error)(_plain(f"{called}: {error}")) from None
    except RecursionError:
        raise ArgumentError(f"{called}: it is nested too deeply") from None
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ArgumentError(_plain(f"{called}: {error}")) from None


def _plain(words: str) -> str:
    """Without what a terminal would obey, and not without end: a file's texts are shown in errors and headings."""
    if len(words) > _LONGEST_WORDS:
        words = f"{words[: _LONGEST_WORDS // 2]} ... {words[-_LONGEST_WORDS // 4 :]}"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in words)


def source(name: str) -> str:
    """The text of a shipped problem's file; ArgumentError for a name that none has."""
    if name not in shipped():
        raise ArgumentError(f"problem {name!r}: shipped are {', '.join(shipped())}")
    return _text(name)[0]


def title(name: str) -> str:
    """The title of a shipped problem, which is not built for it: that may need SciPy, or take time."""
    return str(tomllib.loads(source(name)).get("title", ""))


def _folder() -> Any:
    return files("scanfield.pinn") / "problems"


def _text(name: str | os.PathLike[str]) -> tuple[str, str]:
    if isinstance(name, str) and name in shipped():
        return (_folder() / f"{name}.toml").read_text(encoding="utf-8"), name
    path = Path(name)
    found = _is_file(path)
    if path.suffix != ".toml" or not found:
        why = "a problem file ends in .toml" if found else "no such file"
        raise ArgumentError(f"problem {os.fspath(name)!r}: {why}, and shipped are {', '.join(shipped())}")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise ArgumentError(f"{path}: longer than {_LARGEST_FILE} characters, so no problem file")
        # tomllib takes time and memory as the square of a key's parts: 4 GB for a key of 64 KB.
        if max(line.count(".") for line in text.split("\n")) > _MOST_DOTS:
            raise ArgumentError(f"{path}: a line with more than {_MOST_DOTS} dots, so no problem file")
        return text, path.stem
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path}: cannot be read ({error})") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or with what no name has
        return False


def _made(called: str, tables: dict[str, Any], replaced: Mapping[str, float]) -> ProblemFile:
    unknown = [key for key in tables if key not in _TABLES]
    if unknown:
        raise ArgumentError(f"[{unknown[0]}]: no such table; there are {', '.join(_TABLES)}")
    for key in ("problem", "domain", "network"):
        if key not in tables:
            raise ArgumentError(f"[{key}] is missing: a file has [problem], [domain] and [network] at least")
    entries = tables.get("boundary", [])
    if not isinstance(entries, list):
        raise ArgumentError("[boundary]: conditions are a list, write [[boundary]] above each")
    given = _table("parameters", tables.get("parameters", {}))
    taken = [key for key in given if key in _TAKEN]
    if taken:
        raise ArgumentError(f"parameter {taken[0]!r}: formulas know this name as something else")
    for key in replaced:
        if key not in given:
            raise ArgumentError(f"parameter {key!r}: the file has {', '.join(given) or 'none'}")
    names: dict[str, float] = {}
    for key, value in (given | dict(replaced)).items():  # later ones may use earlier ones
        names[key] = number(value, key, names)

    solution = _solution(tables.get("solution"), names)
    stated = _table("problem", tables["problem"])
    if "wavenumber" not in stated:
        raise ArgumentError("[problem] wavenumber is missing: a number or a formula in quotes")
    domain = _domain(_table("domain", tables["domain"]), names)
    d = domain.dimensions
    held = [_condition(_table("boundary", entry), names, solution, d) for entry in entries]
    k = _value(stated.pop("wavenumber"), names, d, solution, ("wavenumber",))
    f = _value(stated.pop("source", 0.0), names, d, solution, ("source",))
    problem = Helmholtz(domain, k, f, held)
    exact = _value(stated.pop("exact"), names, d) if "exact" in stated else solution
    if isinstance(exact, float):
        exact = Formula(repr(exact))
    if stated:
        raise ArgumentError(f"[problem] {next(iter(stated))}: allowed are wavenumber, source, exact")

    if exact is not None:  # known before the training, not after it
        evaluate("exact", exact, domain.interior(16), given=domain.given)

    network = _table("network", tables["network"])
    for key in network:
        if key not in _NETWORK:
            raise ArgumentError(f"[network] {key}: allowed are {', '.join(_NETWORK)}")
    if "features" not in network:
        raise ArgumentError(
            "[network] features is missing: the number of frequencies, an integer of at least 1"
        )
    if not isinstance(network.get("trainable", True), bool):
        raise ArgumentError(
            f"[network] trainable = {shown(network['trainable'])}: allowed are true and false"
        )
    _check_size(network, domain.dimensions)
    features: dict[str, Any] = {
        key: network.pop(key) for key in ("features", "scale", "wavenumber", "trainable") if key in network
    }
    features |= {key: number(features[key], key, names) for key in ("scale", "wavenumber") if key in features}
    features["seed"] = network["seed"] = check_count("[network] seed", network.get("seed", 0), 0)
    training = _table("training", tables.get("training", {}))
    allowed = set(inspect.signature(train).parameters) - {
        "problem",
        "network",
        "callbacks",
        "progress",
        "reducer",
        "checkpoint",
        "resume",
    }
    for key in training:
        if key not in allowed:
            raise ArgumentError(f"[training] {key}: allowed are {', '.join(sorted(allowed))}")
    check_count("[training] seed", training.get("seed", 0), 0)
    for key in ("points", "boundary", "held_out"):
        if key in training and check_count(f"[training] {key}", training[key]) > _MOST_POINTS:
            raise ArgumentError(f"[training] {key} = {training[key]}: at most {_MOST_POINTS} are drawn")
    title = _plain(str(tables.get("title", called)))
    made = ProblemFile(called, title, problem, exact, features, network, training)
    drawn = made.make_network()  # what the file says of the network and of the training is checked now
    try:
        check_settings(problem, drawn, **training)
    except ScanfieldError as error:
        raise type(error)(f"[training] {error}") from None
    return made


def _check_size(network: Mapping[str, Any], dimensions: int) -> None:
    """ArgumentError for a network too large to draw, before anything of it is."""
    count = check_count("[network] features", network["features"])
    hidden = network.get("hidden", ())
    widths = [
        check_count("[network] hidden", w) for w in (hidden if isinstance(hidden, list | tuple) else [hidden])
    ]
    size = dimensions * count + sum(a * b for a, b in itertools.pairwise([2 * count, *widths, 2]))
    if size > _MOST_PARAMETERS:
        raise ArgumentError(
            f"[network] features = {count}, hidden = {hidden!r:.40}: {size:.2g} parameters, allowed are {_MOST_PARAMETERS}"
        )


def _value(
    value: Any,
    names: Mapping[str, float],
    dimensions: int,
    solution: solutions.Solution | None = None,
    known: tuple[str, ...] = (),
    *,
    boundary: bool = False,
) -> Any:
    """A number, a formula, or what is known of the solution."""
    if isinstance(value, str):
        if value.startswith("solution."):
            part = value.removeprefix("solution.")
            if solution is None or part not in known:
                words = " and ".join(f"solution.{name}" for name in known) or "none"
                raise ArgumentError(f"{shown(value)}: known here: {words}, with a [solution]")
            return getattr(solution, part)
        return Formula(value, names, dimensions=dimensions, boundary=boundary)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"{shown(value)}: a number or a formula in quotes is expected")
    return number(value, "value", names)


def _table(name: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ArgumentError(f"{name} = {entry!r:.40}: a table, [{name}], is expected")
    return dict(entry)


def _numbers(value: Any, name: str, names: Mapping[str, float]) -> Any:
    if isinstance(value, list):
        return [number(entry, name, names) for entry in value]
    return number(value, name, names)


def _build(make: Callable[..., Any], table: str, kind: str, arguments: Mapping[str, Any]) -> Any:
    """`make(**arguments)`; a key that is missing or not taken is named as the file writes it."""
    taken = inspect.signature(make).parameters
    for key in arguments:
        if key not in taken:
            raise ArgumentError(
                f"[{table}] {key}: kind = {kind!r} takes {', '.join(taken) or 'nothing more'}"
            )
    for key, parameter in taken.items():
        if parameter.default is inspect.Parameter.empty and key not in arguments:
            raise ArgumentError(f"[{table}] {key} is missing: kind = {kind!r} takes {', '.join(taken)}")
    return make(**arguments)


def _kind(entry: dict[str, Any], table: str, kinds: Mapping[str, Any]) -> tuple[str, Any]:
    kind = entry.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ArgumentError(f"[{table}] kind = {shown(kind)}: allowed are {', '.join(kinds)}")
    return kind, kinds[kind]


def _domain(entry: dict[str, Any], names: Mapping[str, float]) -> Domain:
    hole = entry.pop("hole", None)
    kind, make = _kind(entry, "domain", _DOMAINS)
    numbers = {key: _numbers(value, key, names) for key, value in entry.items()}
    domain: Domain = _build(make, "domain", kind, numbers)
    return domain if hole is None else Difference(domain, _domain(_table("hole", hole), names))


def _solution(entry: Any, names: Mapping[str, float]) -> solutions.Solution | None:
    if entry is None:
        return None
    held = _table("solution", entry)
    kind, make = _kind(held, "solution", _SOLUTIONS)
    plain = {key: held.pop(key) for key in ("total", "orders", "order", "function") if key in held}
    numbers = {key: _numbers(value, key, names) for key, value in held.items()}
    found: solutions.Solution = _build(make, "solution", kind, plain | numbers)
    return found


def _condition(
    entry: dict[str, Any], names: Mapping[str, float], solution: solutions.Solution | None, dimensions: int
) -> Any:
    kind, make = _kind(entry, "boundary", _CONDITIONS)
    for key in ("value", "coefficient"):
        if key in entry:
            entry[key] = _value(entry[key], names, dimensions, solution, _DATA, boundary=True)
    for key in ("width", "weight", "ratio", "phase", "reflection"):
        if key in entry:
            entry[key] = number(entry[key], key, names)
    if "region" in entry:
        entry["region"] = _domain(_table("region", entry["region"]), names)
    if isinstance(entry.get("where"), list):
        entry["where"] = tuple(entry["where"])
    if not isinstance(entry.get("where", ""), str | tuple):
        raise ArgumentError(
            f"[boundary] where = {shown(entry['where'])}: the name of a part of the boundary, or a list of them"
        )
    if not isinstance(entry.get("hard", False), bool):
        raise ArgumentError(f"[boundary] hard = {shown(entry['hard'])}: allowed are true and false")
    return _build(make, "boundary", kind, entry)
