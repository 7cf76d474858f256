"""Field report F075: the same call gives the same bits. (Its GPU half joins with the CUDA kernels; F076 and F077 with
`pinn`.)"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from calls import CHEAP_FORMS, GENERIC, pull
from draws import G, M, bitwise, within
from processes import python

pytestmark = GENERIC

HERE = (Path(__file__).resolve().parent,)


def bits(library, result, gradients):
    named = {"output": result.output, "final_state": result.final_state} | gradients
    return {name: library.raw(x) for name, x in named.items()}


@pytest.mark.parametrize("method", CHEAP_FORMS)
def test_f075_gdn2_repeats_bit_for_bit(library, method):
    drawn = G(36, 2, 257, 5, 32, 16)
    inputs = drawn.inputs()

    def run(heads=slice(None)):
        part = {name: x[:, :, heads] for name, x in inputs.items()}
        cotangents = drawn.d_output[:, :, heads], drawn.d_state[:, heads]
        return bits(library, *pull(library, "gdn2", part, *cotangents, "float32", method=method))

    first = run()
    for _ in range(9):
        for name, x in run().items():
            bitwise(x, first[name], name)
    for name, x in run(slice(3, 4)).items():
        whole = first[name][:, 3:4] if name == "final_state" else first[name][:, :, 3:4]
        within(x, whole, 1e-6, f"head 3 alone: {name}")
        # What another batch size changes is how XLA fuses anything, and in which order torch sums a batched product.
        if library.name != "jax" and not (library.name == "torch" and method != "generic.recurrent"):
            bitwise(x, whole, f"head 3 alone: {name}")


def test_f075_the_selective_scan_repeats_bit_for_bit(library):
    drawn = M(36, 2, 257, 5, 4)

    def run():
        return bits(
            library,
            *pull(library, "selective_scan", drawn.inputs(), drawn.d_output, drawn.d_state, "float32"),
        )

    first = run()
    for _ in range(9):
        for name, x in run().items():
            bitwise(x, first[name], name)


THREADS = """
    import hashlib, os, sys
    # The pools of NumPy's BLAS and of XLA have as many threads as the process has processors.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])
    import arrays
    from calls import pull
    from draws import G, M

    library = arrays.library(sys.argv[1])
    if sys.argv[1] == "torch":
        library.torch.set_num_threads(int(sys.argv[2]))
    found = []
    drawn = G(36, 2, 257, 5, 32, 16)
    for method in (None,) if sys.argv[1] == "jax" else (None, "generic.recurrent", "generic.chunk"):
        result, gradients = pull(
            library, "gdn2", drawn.inputs(), drawn.d_output, drawn.d_state, "float32", method=method
        )
        found += [result.output, result.final_state, *gradients.values()]
    drawn = M(36, 2, 257, 5, 4)
    result, gradients = pull(library, "selective_scan", drawn.inputs(), drawn.d_output, drawn.d_state, "float32")
    found += [result.output, result.final_state, *gradients.values()]
    for x in found:
        print(hashlib.sha256(library.raw(x).tobytes()).hexdigest())
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot keep a process to one processor"
)
@pytest.mark.backend("numpy", "torch", "jax")
def test_f075_the_number_of_threads_changes_no_bit(request):
    found = []
    for threads in ("1", "2"):
        variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
        found.append(python(THREADS, request.config.getoption("--backend"), threads, path=HERE, **variables))
    assert found[0] == found[1]
