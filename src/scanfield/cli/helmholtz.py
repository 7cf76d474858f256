"""`scanfield helmholtz PROBLEM`: solve a Helmholtz problem with a network, write the field, draw it.

PROBLEM is a TOML file or the name of a shipped problem. The points, the frequencies and the weights come from the seed, the
wavenumber and the feature scale that the file states. The field is evaluated on a grid over the domain and written to an npz
file: `x` (n, d), `field` (n,) and, where it is known, `exact` (n,). The last line is then the relative L2 error on that grid.
Ctrl-C ends the training; the field as it is then is written all the same (not over another one, unless --output says so), and
the exit status is 130.
What a file may say: docs/pinn.md, "A problem file of your own", or start from one that is shipped (--show).
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from scanfield import tensorfile
from scanfield.cli.console import progress, table
from scanfield.errors import ArgumentError, BackendError, DeviceError

_EXAMPLES = """\
examples:
  scanfield helmholtz square-1-4                             a standard problem, in seconds
  scanfield helmholtz square-1-4 --set a1=2.5 --set a2=3.3   other parameters of the file
  scanfield helmholtz hard-disk --plot disk.png              with a picture
  scanfield helmholtz mine.toml --library torch              your own problem, on tensors
  scanfield helmholtz --list                                 the shipped problems
  scanfield helmholtz --show two-media > mine.toml           one of them as a file to start from
  scanfield helmholtz --reproduce                            ours beside published values
"""
LIBRARIES = ("numpy", "torch", "jax", "cupy")


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "helmholtz",
        help="solve a Helmholtz problem with a network, from a TOML file or a shipped problem",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "problem", nargs="?", metavar="PROBLEM", help="a TOML file, or the name of a shipped problem"
    )
    parser.add_argument(
        "--library", choices=LIBRARIES, default="numpy", help="whose arrays to use (default: numpy)"
    )
    parser.add_argument(
        "--device", metavar="DEVICE", help="of that library, for example cuda (default: its own)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="another value of a parameter in the file",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE.npz", help="where the field goes (default: PROBLEM.npz)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="also draw the field, its error and the history"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--list", action="store_true", help="list the shipped problems")
    parser.add_argument("--show", metavar="PROBLEM", help="print a shipped problem's file")
    parser.add_argument(
        "--reproduce", action="store_true", help="solve published problems; ours beside theirs"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Solve, write, draw; 0 all well."""
    # Training imports SciPy: only the command that needs it pays.
    from scanfield.pinn import files
    from scanfield.pinn.diagnose import DiagnosisWarning
    from scanfield.pinn.plotting import picture
    from scanfield.pinn.run import INTERRUPTED

    if arguments.list:
        for name in files.shipped():
            print(f"{name:18} {files.title(name)}")
        return 0
    if arguments.show:
        print(files.source(arguments.show), end="")
        return 0
    if arguments.reproduce:
        return _reproduce(quiet=arguments.quiet)
    if arguments.problem is None:
        raise ArgumentError(f"PROBLEM is missing: a TOML file, or one of {', '.join(files.shipped())}")
    problem = files.load_problem(arguments.problem, **_parameters(arguments.set))
    # What cannot be written is refused before the training, not after it.
    output = arguments.output or Path(f"{problem.name}.npz")
    if output.suffix.lower() not in ("", ".npz"):
        raise ArgumentError(
            f"--output = {str(output)!r}: the field goes to an npz file, the allowed ending is .npz"
        )
    plot = None if arguments.plot is None else picture("--plot", arguments.plot)
    for path in dict.fromkeys((output, arguments.plot, plot)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ArgumentError(f"{path}: there is no folder {path.resolve().parent}")
        if path is not None and path.is_dir():
            raise ArgumentError(f"{path}: it is a folder, the name of a file is expected")
    _check_apart(arguments.problem, output, plot)
    for path in (output, plot):
        _check_writable(path)
    network = _network(problem, arguments.library, arguments.device)
    print(f"{problem.title}\n{network}", flush=True)
    with warnings.catch_warnings():
        # Told as they come, so that a long training need not be waited for, and without a line of Python.
        warnings.simplefilter("always", DiagnosisWarning)
        warnings.showwarning = lambda words, *_, **__: print(f"warning: {words}", file=sys.stderr, flush=True)
        fit = problem.solve(network, progress=False if arguments.quiet else None)
    print(fit, flush=True)
    if fit.reason == INTERRUPTED:
        # Where nobody has said where, it does not replace the field of a training that was not interrupted.
        _write(problem, fit, None if arguments.output is None and output.exists() else output, plot)
        raise KeyboardInterrupt
    _write(problem, fit, output, plot)
    return 0


def _check_apart(problem: str, output: Path, plot: Path | None) -> None:
    """ArgumentError where one file would be written over another that the call names."""
    from scanfield.pinn import files

    named = {"--plot": plot, "PROBLEM": None if problem in files.shipped() else Path(problem)}
    taken = {"--output": output}
    for name, path in named.items():
        for other, place in taken.items():
            if path is not None and _same(path, place):
                raise ArgumentError(f"{other}: {place} is the file of {name} too; give it another name")
        if path is not None:
            taken[name] = path


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def _check_writable(path: Path | None) -> None:
    """The error that writing would end with, while nothing is lost by it; what is there stays as it is."""
    if path is None or (path.exists() and not path.is_file()):
        return  # a device or pipe: to open it may already do something
    there = path.exists()
    path.open("ab").close()
    if not there:
        path.resolve().unlink()


def _replace(output: Path, content: memoryview) -> None:
    """A file is replaced when the new one is whole, the one that a link points at too; a device is written into.

    So is a file beside which no other one can be made.
    """
    try:
        if not output.exists() or output.is_file():
            with tensorfile.whole_file(output.resolve()) as file:
                file.write(content)
            return
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG):
            raise
    with output.open("wb") as file:
        file.write(content)


def _write(problem: Any, fit: Any, output: Path | None, plot: Path | None) -> None:
    from scanfield.pinn.fit import evaluation_grid, relative_error

    x = evaluation_grid(problem.problem)
    found = {"x": x, "field": fit.field(x)}
    if problem.exact is not None:
        found["exact"] = np.asarray(problem.exact(x))
    if output is None:
        print("no field is written: one of that name is there already; --output says where")
    else:
        packed = io.BytesIO()
        np.savez(packed, **found)
        _replace(output, packed.getbuffer())
        print(f"field written to {output}")
    if plot is not None:
        fit.plot(plot, problem.exact)
        print(f"plot written to {plot}")
    if problem.exact is not None and not np.any(found["exact"]):
        print(f"the exact field is zero, the largest value found {np.max(np.abs(found['field'])):.1e}")
    elif problem.exact is not None:
        print(f"relative L2 error {relative_error(found['field'], found['exact']):.1e}")
    else:
        print(
            "no exact field is stated: judge by the held-out residual, and by what more points and features change"
        )


def _reproduce(*, quiet: bool) -> int:
    from scanfield.pinn.reproduce import ENTRIES, Row, reproduce

    rows: list[Row] = []
    interrupted = False
    with progress("solving", len(ENTRIES), quiet=quiet) as tick:

        def done(row: Row) -> None:
            rows.append(row)
            tick(row.entry.title)

        try:
            rows = reproduce(done=done)
        except KeyboardInterrupt:
            interrupted = True
    head = ("problem", "ours", "CPU s", "parameters", "reference", "source")
    cells = [
        (
            row.entry.title,
            f"{row.error:.1e}",
            f"{row.seconds:.1f}",
            str(row.parameters),
            row.entry.reference,
            row.entry.source,
        )
        for row in rows
    ]
    if rows:
        print(table([head, *cells]), flush=True)
    if interrupted:
        raise KeyboardInterrupt
    return 0


def _parameters(given: list[str]) -> dict[str, float]:
    found = {}
    for words in given:
        name, _, value = words.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ArgumentError(f"--set {words}: NAME=NUMBER is expected") from None
    return found


def _network(problem: Any, library: str, device: str | None) -> Any:
    """The file's network on a device; DeviceError, in the library's words, for one that does not hold numbers."""
    from scanfield.pinn.placing import to_host

    xp = _namespace(library)
    if device is None:
        return problem.make_network(xp)
    try:
        # JAX's own devices have no names that it takes.
        place = importlib.import_module("jax").devices(device)[0] if library == "jax" else device
        network = problem.make_network(xp, device=place)
        to_host(network.flatten())
    except Exception as error:  # each library raises its own
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise DeviceError(f"--device {device!r}: {library} has none ({words:.200})") from None
    return network


def _namespace(library: str) -> Any:
    """The namespace of a library that is installed."""
    if library == "numpy":
        return np
    try:
        if library == "jax":
            # Training needs float64, which JAX makes only when told.
            importlib.import_module("jax").config.update("jax_enable_x64", True)
            return importlib.import_module("jax.numpy")
        return importlib.import_module(f"array_api_compat.{library}")
    except ImportError as error:
        print(f"scanfield info shows what is installed ({error})", file=sys.stderr)
        raise BackendError(f"--library {library}: it is not installed; {_INSTALL[library]}") from None


_INSTALL = {
    "torch": "pip install 'scanfield[torch]'",
    "jax": "pip install 'scanfield[jax]'",
    "cupy": "pip install 'scanfield[cupy-cuda12]'",
}
