"""One run of the tests meets one array library: `pytest --backend torch` (default: numpy).

Fixtures   library   the `arrays.Library` under test: data in, data out
           xp        its namespace
           device    its test device (None: the only one)
           dtype     "float64", then "float32"
Markers    backend("torch", ...)   runs only in a run of one of these; all others leave it out
           gpu                     needs a GPU that the run's library can use; skipped, with that reason, without one

leave_out  a function of a test module, leave_out(backend, test, parameters) -> bool: which of its tests a run
           does without, because the library makes them dear and the others stand for them
A test whose parameter `method` is one of the compiled scans' runs on the arrays that this one is for, where numba is.

A test that asks for `library` or `xp` runs with every backend. A test that asks for neither does not depend
on an array library and runs in the numpy run only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).resolve().parent
# The readable truth and the converters are plain modules beside this file, whatever import mode pytest is in.
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import arrays  # noqa: E402  (needs the line above)
import examples  # noqa: E402

GOLDEN = HERE / "golden"
_NONE = SimpleNamespace(params={})  # of a test without parameters


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        choices=arrays.SESSIONS,
        default="numpy",
        help="the array library that this run tests (default: numpy)",
    )
    parser.addoption(
        "--standin",
        action="store_true",
        help="with --backend cupy, on a machine without a card: a CuPy made of NumPy arrays, kernels by an emulator",
    )
    parser.addoption("--slow", action="store_true", help="also what is marked slow: minutes each, not in CI")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--backend")
    if name == "cupy" and config.getoption("--standin"):
        _put_standin(config)
    if name == "cupy" and not arrays.has_gpu("cupy"):
        # A run in which every test is skipped would look like a pass.
        raise pytest.UsageError("--backend cupy needs the package cupy and a CUDA device that it can use")
    os.environ["SCANFIELD_CACHE_DIR"] = str(compiled_kernels(config))
    if name == "jax":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if name in ("jax", "torch", "strict", "dask"):
        arrays.library(name)  # x64, threads and flags are set before any test module makes an array
    # Examples are the same in every run: a red run can be run again.
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # a run of a few files without Hypothesis installed is fine
        return
    settings.register_profile(
        "scanfield",
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=12,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("scanfield")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under coverage a worker of xdist writes its counts here: ended ten seconds later, a slow one would lose them."""
    counting = "coverage" in sys.modules and sys.modules["coverage"].Coverage.current()
    if counting and hasattr(session.config, "workerinput"):
        counting.save()


def _put_standin(config: pytest.Config) -> None:
    """The stand-in for CuPy, for the whole run."""
    sys.path.append(str(HERE / "cuda"))
    import emulator
    import standin

    if emulator.missing():
        raise pytest.UsageError(f"--standin: {emulator.missing()}")
    context = standin.installed()
    context.__enter__()
    config.add_cleanup(lambda: context.__exit__(None, None, None))


def compiled_kernels(config: pytest.Config) -> Path:
    """Where all processes of a run, and later runs of the same sources, find kernels that are compiled already.

    Tests about compiling and about the cache itself name another folder, or none.
    """
    spec = importlib.util.find_spec("scanfield_numpy")
    digest = hashlib.sha256()
    if spec is not None and spec.origin is not None:
        for source in sorted(Path(spec.origin).parent.glob("*.py")):
            digest.update(source.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    cache = getattr(config, "cache", None)  # absent under -p no:cacheprovider
    return Path(tempfile.gettempdir()) / f"scanfield-{name}" if cache is None else cache.mkdir(name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "library" in metafunc.fixturenames:
        name = metafunc.config.getoption("--backend")
        names = ["numpy", "readonly"] if name == "numpy" else [name]
        metafunc.parametrize("library", names, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    name = config.getoption("--backend")
    gpu = not config.getoption("--standin") and any(item.get_closest_marker("gpu") for item in items)
    gpu = gpu and arrays.has_gpu(name)
    slow = config.getoption("--slow")
    kept, left_out = [], []
    for item in items:
        mark = item.get_closest_marker("backend")
        if mark is not None:
            wanted = mark.args
        elif "library" in getattr(item, "fixturenames", ()):
            wanted = arrays.SESSIONS
        else:
            wanted = ("numpy",)
        unknown = set(wanted) - set(arrays.SESSIONS)
        if unknown:
            raise pytest.UsageError(
                f"{item.nodeid}: backend({sorted(unknown)}) is not one of {arrays.SESSIONS}"
            )
        if "pinn" in item.path.parts:  # a training is a loop over values: nobody runs it on lazy graphs
            wanted = tuple(session for session in wanted if session != "dask")
        rule = getattr(item.module, "leave_out", None)
        given = getattr(item, "callspec", _NONE).params
        dear = rule is not None and rule(name, item.originalname, given)
        method = given.get("method")
        compiled = examples.COMPILED_FOR.get(method)
        if compiled and name != compiled:
            wanted = (compiled,)
        waits = not slow and item.get_closest_marker("slow") is not None
        (kept if name in wanted and not dear and not waits else left_out).append(item)
        if compiled and method.endswith(".numba") and importlib.util.find_spec("numba") is None:
            item.add_marker(pytest.mark.skip(reason="the compiled scans need numba"))
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU that {name} can use"))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> arrays.Library:
    """The array library under test; a numpy run meets it twice, with writable and with read-only arrays."""
    return arrays.library(request.param)


@pytest.fixture(scope="session")
def xp(library: arrays.Library):
    return library.xp


@pytest.fixture(scope="session")
def device(library: arrays.Library):
    return library.device


@pytest.fixture(scope="session", params=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden cases."""
    return GOLDEN
