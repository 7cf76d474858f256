"""Field reports F062 to F067: import, installation, plugins, threads and fork.

The halves of F062 and F063 that load more than scanfield itself join with `compat` and `pinn`.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import announce, python

HERE = (Path(__file__).resolve().parent,)


BARE = """
    import sys, time
    from importlib.abc import MetaPathFinder
    MISSING = ("torch", "jax", "jaxlib", "cupy", "dask", "numba", "triton")

    class Refuse(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in MISSING:
                raise ImportError(f"{name} is not there")

    sys.meta_path.insert(0, Refuse())
    import numpy, array_api_compat, array_api_compat.numpy  # what the core depends on is paid before
    before = time.process_time()
    import scanfield
    spent = time.process_time() - before

    import arrays, reference
    from calls import truth_vjp
    from operations import every_operation, token

    library = arrays.library("numpy")
    examples = every_operation(54, 1, 5, 2, 4, 3, channels=3, state=2)
    assert len(examples) == 12
    for operation, (inputs, options, _) in examples.items():
        function = getattr(scanfield, operation)
        result, pullback = scanfield.vjp(function, **inputs, **options)
        truth = reference.forward(operation, inputs, **options)
        assert arrays.deviation(result.output, truth.output) <= 1e-12, operation
        assert arrays.deviation(result.final_state, truth.final_state) <= 1e-12, operation
        r = numpy.random.default_rng(540)
        cotangents = r.standard_normal(result.output.shape), r.standard_normal(result.final_state.shape)
        gradients = pullback(*cotangents)
        wanted = reference.vjp(operation, inputs, *cotangents, **options)
        for name, gradient in gradients.items():
            assert arrays.deviation(gradient, wanted[name]) <= 1e-11, (operation, name)
        state = inputs["initial_state"]
        for t in range(result.output.shape[1]):
            y, state = function.step(state, **token(inputs, t), **options)
            assert arrays.deviation(y, truth.output[:, t]) <= 1e-11, (operation, t)
        assert arrays.deviation(state, truth.final_state) <= 1e-11, operation
        explained = scanfield.explain(function, **inputs, **options)
        assert explained.taken["forward"].startswith("generic."), explained
    listed = {backend.name: backend for backend in scanfield.backends()}
    for name in ("torch", "jax", "cupy", "dask", "numba"):
        assert listed[name].status == "missing", listed[name]
        assert listed[name].install.startswith("pip install"), listed[name]
        assert listed[name].install in str(scanfield.backends())
    assert not {name for name in sys.modules if name.partition(".")[0] in MISSING}
    print(spent)
"""


def test_f062_numpy_alone_is_enough():
    """Every operation, its pullback and its step without any other library. The gradients of derived operations are
    compared with differences in extended precision, which are good to 1e-13 of the loss."""
    assert float(python(BARE, path=HERE)) < 0.3


LIGHT = """
    import sys, threading, time
    import numpy, array_api_compat
    before = time.process_time()
    import scanfield
    spent = time.process_time() - before
    heavy = ("torch", "jax", "jaxlib", "cupy", "dask", "numba", "transformers")
    assert not {name for name in sys.modules if name.partition(".")[0] in heavy}, sorted(sys.modules)
    assert threading.active_count() == 1
    import os
    if os.path.isdir("/proc/self"):
        assert len(os.listdir("/proc/self/task")) == int(sys.argv[1]), "a thread outside Python was started"
        assert not any("nvidia" in os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{n}")), "a GPU was opened"
    print(spent)
"""

THREADS_OF_NUMPY = """
    import os, numpy, array_api_compat
    print(len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self") else 1)
"""


def test_f063_import_makes_nothing():
    """No framework, thread, array on a device or GPU context; under 0.3 s of processor time."""
    assert float(python(LIGHT, python(THREADS_OF_NUMPY).strip())) < 0.3


READ_ONLY = """
    import importlib.util, os, sys
    from processes import read_only_but
    for name in ("HOME", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    installed, writable = sys.argv[1:]
    read_only_but(writable)
    import scanfield, scanfield_numpy
    assert scanfield.__file__.startswith(installed) and scanfield_numpy.__file__.startswith(installed)
    import arrays, reference
    from draws import L
    inputs = L(55, 1, 5, 3).inputs()
    truth = reference.forward("linear_scan", inputs)
    explained = scanfield.explain(scanfield.linear_scan, **inputs)
    names = list(dict.fromkeys(verdict.candidate for verdict in explained.verdicts))
    if importlib.util.find_spec("numba") is None:
        names.remove("numpy.numba")
    for name in names:
        result, pullback = scanfield.vjp(scanfield.linear_scan, **inputs, method=name)
        pullback(result.output)
        result = scanfield.linear_scan(**inputs, method=name)
        assert arrays.deviation(result.output, truth.output) <= 1e-12, name
        assert arrays.deviation(result.final_state, truth.final_state) <= 1e-12, name
    try:
        open(os.path.join(installed, "probe"), "w")
    except PermissionError:
        print(*names)
"""


@pytest.mark.parametrize("cached", [False, True])
def test_f064_an_install_that_nobody_may_write_to(tmp_path, cached):
    """Every candidate runs where only the temporary folder can be written; a cache there is filled."""
    installed, writable = tmp_path / "installed", tmp_path / "writable"
    writable.mkdir()
    for package in ("scanfield", "scanfield_numpy"):
        ours = Path(find_spec(package).origin).parent
        shutil.copytree(ours, installed / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*installed.rglob("*"), installed):
        path.chmod(path.stat().st_mode & ~0o222)
    cache = str(writable / "kernels") if cached else ""
    try:
        said = python(READ_ONLY, installed, writable, path=(installed, *HERE), SCANFIELD_CACHE_DIR=cache)
    finally:
        for path in (installed, *installed.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)  # so that it can be removed
    compiled = ["numpy.numba"] if find_spec("numba") else []
    assert said.split() == [*compiled, "generic.recurrent", "generic.blocked"]
    assert not any(path.suffix in (".pyc", ".nbi") for path in installed.rglob("*"))
    assert any(writable.rglob("*.nbi")) is bool(cached and compiled)


PLUGIN = """
    import warnings, sys
    import scanfield
    from draws import G
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inputs = G(56, 1, 4, 1, 3, 2).inputs()
        first = scanfield.gdn2(**inputs)
        second = scanfield.gdn2(**inputs)
        listed = scanfield.backends()
    assert (first.output == second.output).all()
    assert len(caught) == 1, [str(w.message) for w in caught]
    message = str(caught[0].message)
    assert "dummy" in message and sys.argv[1] in message, message
    (broken,) = (backend for backend in listed if backend.status == "broken")
    assert "dummy" in broken.name and sys.argv[1] in broken.detail, broken
    assert sys.argv[1] in str(listed)
"""


@pytest.mark.parametrize("error", ["RuntimeError", "ImportError"])
def test_f065_a_broken_plugin_is_one_warning(tmp_path, error):
    (tmp_path / "dummy_backend.py").write_text(f'raise {error}("boom")\n')
    announce(tmp_path, "dummy_backend", "dummy_backend:MANIFEST")
    python(PLUGIN, "boom", path=(*HERE, tmp_path))


FIRST_CALLS = """
    import hashlib, sys, threading
    import numpy, scanfield, arrays
    from operations import every_operation

    examples = every_operation(57, 1, 6, 2, 4, 3, channels=3, state=2)
    libraries = [arrays.library(name) for name in sys.argv[2].split(",")]
    # Eight first calls, each of another operation, going round the libraries.
    names = ["gdn2", "selective_scan", "linear_scan", "kda", "ssd", "gla", "delta_rule", "comba"]
    work = []
    for i, name in enumerate(names):
        library = libraries[i % len(libraries)]
        inputs, options, _ = examples[name]
        work.append((name, library, library.arrays(inputs), options))
    results, errors = [None] * 8, []
    barrier = threading.Barrier(8)

    def first(i):
        name, library, given, options = work[i]
        if sys.argv[1] == "threads":
            barrier.wait()
        try:
            result, pullback = scanfield.vjp(getattr(scanfield, name), **given, **options)
            found = [result.output, result.final_state, *pullback(result.output, result.final_state).values()]
            results[i] = b"".join(library.raw(x).tobytes() for x in found)
        except BaseException as error:
            errors.append((name, library.name, repr(error)))

    if sys.argv[1] == "threads":
        threads = [threading.Thread(target=first, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for i in range(8):
            first(i)
    assert not errors, errors
    print(hashlib.sha256(b"".join(results)).hexdigest())
"""


@pytest.mark.backend("numpy", "torch", "jax")
def test_f066_eight_threads_make_the_first_call_at_once(request):
    """In twenty fresh processes. Three where another library comes in beside NumPy, be it numba: importing it is most of
    the time, and the table that is filled is the same."""
    backend = request.config.getoption("--backend")
    libraries = ",".join(dict.fromkeys(["numpy", backend]))
    alone = python(FIRST_CALLS, "one thread", libraries, path=HERE)
    for _ in range(20 if backend == "numpy" and find_spec("numba") is None else 3):
        assert python(FIRST_CALLS, "threads", libraries, path=HERE) == alone


FORKED = """
    import multiprocessing, os, signal, sys, time
    import numpy
    import scanfield, arrays
    from draws import G

    library = arrays.library(sys.argv[1])

    def run(_=None):
        drawn = G(58, 1, 64, 4, 16, 16)
        result, pullback = scanfield.vjp(scanfield.gdn2, **library.arrays(drawn.inputs(), "float32"))
        gradients = pullback(library.array(drawn.d_output, "float32"), library.array(drawn.d_state, "float32"))
        found = [result.output, result.final_state, *gradients.values()]
        return b"".join(library.raw(x).tobytes() for x in found)

    read, write = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(write, "wb") as pipe:
            pipe.write(run())
        os._exit(0)
    os.close(write)
    signal.alarm(30)  # the child has half a minute
    with os.fdopen(read, "rb") as pipe:
        theirs = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    signal.alarm(0)
    mine = run()
    assert mine == theirs and len(mine) > 0
    # and again, now that the parent has used it
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert set(pool.map_async(run, range(8)).get(timeout=30)) == {mine}
    assert run() == mine
    if "torch" in sys.modules:
        assert not sys.modules["torch"].cuda.is_initialized()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.backend("numpy", "torch")
def test_f067_a_forked_child_computes_the_same(request):
    """The half in which the child uses a GPU first joins with the CUDA kernels. JAX itself does not survive a fork."""
    python(FORKED, request.config.getoption("--backend"), path=HERE)
