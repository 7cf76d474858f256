"""`import scanfield` is light: no framework, no thread, no time."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from typing import Any

from processes import python

HEAVY = (
    "torch",
    "jax",
    "jaxlib",
    "cupy",
    "dask",
    "numba",
    "scipy",
    "pandas",
    "matplotlib",
    "rich",
    "safetensors",
)


def fresh(code: str) -> Any:
    """Run code in a new interpreter; it leaves what it found in `found`."""
    return json.loads(
        python(textwrap.dedent(code) + "\nimport json; print(json.dumps(found))").splitlines()[-1]
    )


def test_no_framework_and_no_thread():
    found = fresh(f"""
        import sys, threading
        before = threading.active_count()
        import scanfield
        found = {{
            "heavy": [name for name in {HEAVY!r} if name in sys.modules],
            "threads": threading.active_count() - before,
            "backends": [name for name in sys.modules if name.startswith("scanfield_")],
        }}
    """)
    assert found == {"heavy": [], "threads": 0, "backends": []}


def test_a_numpy_call_imports_no_framework_either():
    """Using it with NumPy arrays looks for plugins, whose manifests are strings, and starts no thread for small ones.

    Where numba is installed the call imports it, and numba imports SciPy where it finds it; looking for plugins does not.
    """
    allowed = {"numba", "scipy"} if importlib.util.find_spec("numba") else set()
    forbidden = [name for name in HEAVY if name not in allowed]
    found = fresh(f"""
        import sys, threading
        import numpy
        import scanfield
        x = numpy.ones((1, 3, 2))
        scanfield.backends()
        early = [name for name in {HEAVY!r} if name in sys.modules]
        scanfield.linear_scan(x, x)
        heads = numpy.ones((1, 3, 2, 2))
        result, pullback = scanfield.vjp(scanfield.gdn2, heads, heads, heads)
        pullback(result.output)
        heavy = [name for name in {forbidden!r} if name in sys.modules]
        found = {{"early": early, "heavy": heavy, "threads": threading.active_count()}}
    """)
    assert found == {"early": [], "heavy": [], "threads": 1}


def test_import_time():
    """Under 0.3 s beyond NumPy: the best of several runs, in CPU time, so that a busy machine does not
    matter.
    """
    found = fresh("""
        import json, subprocess, sys
        code = (
            "import time, numpy; start = time.process_time(); import scanfield; "
            "print(time.process_time() - start)"
        )
        runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(5)]
        found = {"best": min(float(run.stdout) for run in runs)}
    """)
    assert found["best"] < 0.3


def test_no_array_is_made_and_no_random_state_is_touched():
    """Importing changes nothing that a program could notice: NumPy's error state, print options and global
    generator.
    """
    found = fresh("""
        import numpy, os, warnings
        state = str(numpy.random.get_state())
        def settings():
            return numpy.geterr(), str(numpy.get_printoptions()), str(warnings.filters), dict(os.environ)
        before = settings()
        import scanfield
        found = {
            "random": str(numpy.random.get_state()) == state,
            "settings": settings() == before,
        }
    """)
    assert found == {"random": True, "settings": True}


def test_every_public_name_is_there():
    found = fresh("""
        import scanfield
        names = sorted(scanfield.__all__)
        found = {"all": names, "missing": [name for name in names if not hasattr(scanfield, name)]}
    """)
    assert found["missing"] == []
    wanted = {
        "linear_scan", "selective_scan", "gdn2", "associative_scan", "linear_attention", "retention", "gla", "ssd",
        "delta_rule", "gated_delta_rule", "kda", "comba", "gated_delta_product", "vjp", "check_gradients", "summarise",
        "compose", "apply", "explain", "backends", "use", "warmup", "operations", "ScanResult", "ScanStates",
        "ScanfieldError", "ShapeError", "DtypeError", "BackendError", "DeviceError", "ArgumentError", "StateError",
    }  # fmt: skip
    assert wanted <= set(found["all"])
