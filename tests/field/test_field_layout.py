"""Field reports F048 and F050 to F052: strides. (F049 joins with the CUDA kernels.)"""

from __future__ import annotations

import numpy as np
import pytest
from calls import GENERIC
from draws import G, L, M, bitwise

import scanfield

pytestmark = GENERIC


def both(operation, views, copies, d_output, d_state, raw):
    """Assert that views and contiguous copies give the same bits, outputs and gradients, in the shapes of the views."""
    results = []
    for given in (views, copies):
        result, pullback = scanfield.vjp(operation, **given)
        gradients = pullback(d_output, d_state)
        results.append({"output": result.output, "final_state": result.final_state} | dict(gradients))
    for name, x in results[0].items():
        bitwise(raw(x), raw(results[1][name]), name)
        if name in views:
            assert tuple(x.shape) == tuple(views[name].shape)


@pytest.mark.backend("numpy")
def test_f048_a_view_into_a_parent_of_more_than_two_to_the_31():
    """10.7 GB of address space, of which under 1 MB is touched."""
    r = np.random.default_rng(60)
    parent = np.zeros((1, 5, 2**29 + 64), dtype=np.float32)
    a = parent[:, :, :4]
    a[...] = r.uniform(0.5, 1, (1, 5, 4))
    b = r.standard_normal((1, 5, 4)).astype(np.float32)
    result, pullback = scanfield.vjp(scanfield.linear_scan, a, b)
    copied, copied_pullback = scanfield.vjp(scanfield.linear_scan, a.copy(), b)
    bitwise(result.output, copied.output)
    assert abs(float(result.output.sum(dtype=np.float64)) - 5.6660352) <= 1e-5
    ones = np.ones_like(b)
    bitwise(pullback(ones)["a"], copied_pullback(ones)["a"])


def test_f050_transposed_and_permuted_arrays(library, dtype):
    drawn = M(33, 2, 9, 6, 4)
    inputs = drawn.inputs()
    xp = library.xp
    copies = library.arrays(inputs, dtype)
    views = dict(copies)
    views["A"] = xp.permute_dims(library.array(np.ascontiguousarray(inputs["A"].T), dtype), (1, 0))
    for name in ("u", "B"):  # stored as (time, channels, batch)
        stored = library.array(np.ascontiguousarray(np.transpose(inputs[name], (1, 2, 0))), dtype)
        views[name] = xp.permute_dims(stored, (2, 0, 1))
        bitwise(library.raw(views[name]), library.raw(copies[name]))
    d_output, d_state = library.array(drawn.d_output, dtype), library.array(drawn.d_state, dtype)
    both(scanfield.selective_scan, views, copies, d_output, d_state, library.raw)


def test_f051_a_slice_of_a_wider_projection(library, dtype):
    drawn = M(34, 2, 9, 4, 3)
    wide = np.full((2, 9, 11), np.nan)
    wide[..., 3:7] = drawn.delta
    copies = library.arrays(drawn.inputs(), dtype)
    views = copies | {"delta": library.array(wide, dtype)[..., 3:7]}
    d_output, d_state = library.array(drawn.d_output, dtype), library.array(drawn.d_state, dtype)
    both(scanfield.selective_scan, views, copies, d_output, d_state, library.raw)
    assert np.isfinite(library.raw(scanfield.selective_scan(**views).output)).all()


def flips(library, x, axes, dtype):
    """What the library's own flip returns: negative strides on NumPy, a copy on torch and JAX."""
    if library.name in ("numpy", "readonly"):
        return np.flip(library.array(x, dtype), axis=axes)
    return library.xp.flip(library.array(x, dtype), axis=axes)


def test_f052_flipped_arrays(library, dtype):
    drawn = L(37, 2, 11, 5)
    d_output, d_state = library.array(drawn.d_output, dtype), library.array(drawn.d_state, dtype)
    for axis in (1, 2):
        views = {name: flips(library, x, axis, dtype) for name, x in drawn.inputs().items()}
        copies = library.arrays({name: np.flip(x, axis=axis) for name, x in drawn.inputs().items()}, dtype)
        both(scanfield.linear_scan, views, copies, d_output, d_state, library.raw)

    given = library.arrays(drawn.inputs(), dtype)
    backward = scanfield.linear_scan(**given, reverse=True)
    flipped = scanfield.linear_scan(
        **{name: flips(library, x, 1, dtype) for name, x in drawn.inputs().items()}
    )
    bitwise(library.raw(backward.output), library.raw(flipped.output)[:, ::-1])

    drawn = G(37, 1, 11, 2, 4, 3)
    views = {name: flips(library, x, 1, dtype) for name, x in drawn.inputs().items()}
    copies = library.arrays({name: np.flip(x, axis=1) for name, x in drawn.inputs().items()}, dtype)
    d_output, d_state = library.array(drawn.d_output, dtype), library.array(drawn.d_state, dtype)
    both(scanfield.gdn2, views, copies, d_output, d_state, library.raw)
