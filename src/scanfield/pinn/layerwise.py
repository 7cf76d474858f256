"""The sweep back one layer at a time, and the primitive operations that it is made of.

    dL_dz = dL_dh (1 - h^2) or dL_dh;   dW = dL_dz^T h_prev;   db = column sums of dL_dz;   dL_dh_prev = dL_dz W
    dB_i = sum_n 2 pi x_i (cos(2 pi x B) dL_dphi_sin - sin(2 pi x B) dL_dphi_cos)

These are for values alone, as a data loss needs them (``loss_and_grad`` sweeps whole jets). The forms that write return
nothing, take ``accumulate=True`` to add to what stands there, refuse arguments that share memory with what they write,
and sum in a fixed order. NumPy, PyTorch and CuPy.
"""

from __future__ import annotations

from scanfield.arrays import Array, check_same_library, current_device_of, device_kind, dtype_name, library_of
from scanfield.errors import ArgumentError, BackendError, DtypeError, ShapeError
from scanfield.pinn.fourier import check_count
from scanfield.pinn.jets import TWO_PI
from scanfield.pinn.primitives import Primitives
from scanfield.pinn.selection import primitives_for
from scanfield.pinn.workspace import WRITABLE, Workspace


def layer_backward(
    dL_dh: Array, h: Array, h_prev: Array, W: Array, apply_tanh_grad: bool
) -> tuple[Array, Array, Array]:
    """Gradients of one layer, as new arrays.

    Parameters
    ----------
    dL_dh, h : (n, out)
        Cotangent of the layer's output, and that output.
    h_prev : (n, in)
        The layer's input.
    W : (out, in)
        Its weight.
    apply_tanh_grad : bool
        Whether the layer ends in a tanh.

    Returns
    -------
    dW, db, dL_dh_prev : (out, in), (out,), (n, in)

    Raises
    ------
    ShapeError, BackendError, DeviceError
        Arguments that do not fit each other.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.pinn import layer_backward
    >>> dW, db, dL_dh_prev = layer_backward(
    ...     numpy.ones((1, 1)), numpy.array([[0.5]]), numpy.array([[2.0, 3.0]]), numpy.array([[4.0, 5.0]]), True
    ... )
    >>> dW.tolist(), db.tolist(), dL_dh_prev.tolist()
    ([[1.5, 2.25]], [0.75], [[3.0, 3.75]])
    """
    _check_layer(dL_dh, h, h_prev, W)
    xp = library_of(W, "W").namespace
    with current_device_of(W):
        dz = dL_dh * (1.0 - h * h) if apply_tanh_grad else dL_dh
        return dz.T @ h_prev, xp.sum(dz, axis=0), dz @ W


def fourier_backward(dL_dphi: Array, x: Array, B: Array) -> Array:
    """The gradient (d, features) of the frequencies from the cotangent (n, 2 features) of [sin | cos](2 pi x B).

    Parameters
    ----------
    dL_dphi : (n, 2 features)
    x : (n, d)
        Points.
    B : (d, features)
        Frequencies in cycles per length.

    Returns
    -------
    (d, features) array

    Raises
    ------
    ShapeError, BackendError, DeviceError
        Arguments that do not fit each other.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.pinn import fourier_backward
    >>> fourier_backward(numpy.array([[1.0, 0.0]]), numpy.array([[1.0]]), numpy.array([[1.0]])).round(12).tolist()
    [[6.28318530718]]
    """
    _check_fourier(dL_dphi, x, B)
    xp = library_of(B, "B").namespace
    with current_device_of(B):
        p, m = (TWO_PI * x) @ B, B.shape[1]
        return TWO_PI * (x.T @ (xp.cos(p) * dL_dphi[:, :m] - xp.sin(p) * dL_dphi[:, m:]))


def mse_backward(pred: Array, target: Array) -> Array:
    """(2 / n) (pred - target), the gradient of the mean over n points of ``|pred - target|^2``, (n, outputs).

    >>> import numpy
    >>> from scanfield.pinn import mse_backward
    >>> mse_backward(numpy.array([[1.0, 2.0], [3.0, 4.0]]), numpy.zeros((2, 2))).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    check_same_library([("pred", pred), ("target", target)])
    _same_shape("target", target, "pred", pred)
    with current_device_of(pred):
        return (pred - target) * (2.0 / pred.shape[0])


# ------------------------------------------------------------------------------------------------------------
# forms that write


def mse_backward_inplace(pred: Array, target: Array, d_loss: Array, *, accumulate: bool = False) -> None:
    """``mse_backward`` into ``d_loss`` (n, outputs)."""
    _same_shape("target", target, "pred", pred)
    steps = _writing("d_loss", d_loss, {"pred": pred, "target": target}, tuple(pred.shape))
    with current_device_of(d_loss):
        if accumulate:
            d_loss += (pred - target) * (2.0 / pred.shape[0])
            return
        steps.subtract(pred, target, d_loss, False)
        steps.module.multiply(d_loss, 2.0 / pred.shape[0], out=d_loss)


def layer_backward_inplace(
    dL_dh: Array,
    h: Array,
    h_prev: Array,
    W: Array,
    layer_idx: int,
    apply_tanh_grad: bool,
    ws: Workspace,
    *,
    accumulate: bool = False,
) -> None:
    """``layer_backward`` into ``dL_dz``, ``dW``, ``db`` and ``dL_dh_prev`` of a workspace, at a layer.

    Parameters
    ----------
    dL_dh, h, h_prev, W, apply_tanh_grad
        As in ``layer_backward``; n is the workspace's batch.
    layer_idx : int
        0 is the layer after the embedding.
    ws : Workspace
    accumulate : bool
        Add to ``dW`` and ``db`` (the cotangents are always written): for row chunks and several loss terms.

    Raises
    ------
    ArgumentError
        A layer that is not there, or an argument that shares memory with what is written.
    ShapeError
        Shapes that do not fit. Nothing has been written then.
    """
    if check_count("layer_idx", layer_idx, 0) >= ws.num_layers:
        raise ArgumentError(f"layer_idx: {layer_idx!r}; allowed is 0 to {ws.num_layers - 1}")
    _check_layer(dL_dh, h, h_prev, W)
    given = {"dL_dh": dL_dh, "h": h, "h_prev": h_prev, "W": W}
    dz, dW, db, dh_prev = (each[layer_idx] for each in (ws.dL_dz, ws.dW, ws.db, ws.dL_dh_prev))
    n, (out, into) = dL_dh.shape[0], W.shape
    steps = _writing("ws.dL_dz", dz, given, (n, out))
    _writing("ws.dW", dW, given, (out, into))
    _writing("ws.db", db, given, (out,))
    _writing("ws.dL_dh_prev", dh_prev, given, (n, into))
    with current_device_of(W):
        if apply_tanh_grad:
            steps.tanh_slope_times(h, dL_dh, dz, False)
        else:
            dz[...] = dL_dh
        module = steps.module
        if accumulate:
            product = module.matmul(dz.T, h_prev, out=ws.buffers.take("product", (out, into)))
            module.add(dW, product, out=dW)
        else:
            module.matmul(dz.T, h_prev, out=dW)
        steps.sum_rows(dz, db, accumulate, ws.buffers.take)
        module.matmul(dz, W, out=dh_prev)


def fourier_backward_inplace(
    dL_dphi: Array, x: Array, B: Array, ws: Workspace, dL_dB: Array | None = None, *, accumulate: bool = False
) -> None:
    """``fourier_backward`` into ``ws.dB``, or into ``dL_dB``; sine and cosine come from ``ws`` only as memory."""
    _check_fourier(dL_dphi, x, B)
    target = ws.dB if dL_dB is None else dL_dB
    fourier_grad(x, dL_dphi, B, target, TWO_PI, accumulate=accumulate, scratch=ws)


# ------------------------------------------------------------------------------------------------------------
# primitive operations


def sub_out(a: Array, b: Array, out: Array, *, accumulate: bool = False) -> None:
    """out = a - b, or out += a - b; all of one shape."""
    _same_shape("b", b, "a", a)
    steps = _writing("out", out, {"a": a, "b": b}, tuple(a.shape))
    with current_device_of(out):
        steps.subtract(a, b, out, accumulate)


def mul_scalar_out(a: Array, s: float, out: Array, *, accumulate: bool = False) -> None:
    """out = a s, or out += a s; ``s`` a Python number."""
    if not isinstance(s, int | float):
        raise ArgumentError(f"s: expected a Python number, came {type(s).__name__}")
    steps = _writing("out", out, {"a": a}, tuple(a.shape))
    with current_device_of(out):
        steps.scale(a, s, out, accumulate)


def tanh_deriv_mul_out(h: Array, g: Array, out: Array, *, accumulate: bool = False) -> None:
    """out = (1 - h^2) g, or out += it; the derivative of tanh where its value is h."""
    _same_shape("g", g, "h", h)
    steps = _writing("out", out, {"h": h, "g": g}, tuple(h.shape))
    with current_device_of(out):
        steps.tanh_slope_times(h, g, out, accumulate)


def sum_rows_out(a: Array, out: Array, *, accumulate: bool = False) -> None:
    """out (width,) = the sum of the rows of a (n, width), or out += it."""
    if len(a.shape) != 2:
        raise ShapeError(f"a has shape {tuple(a.shape)}; expected (n, width)")
    steps = _writing("out", out, {"a": a}, (a.shape[1],))
    with current_device_of(out):
        steps.sum_rows(a, out, accumulate)


def memset_zero_out(out: Array) -> None:
    """Set every entry to zero."""
    steps = _writing("out", out, {}, tuple(out.shape))
    with current_device_of(out):
        steps.zero(out)


def fourier_grad(
    x: Array,
    dL_dphi: Array,
    B: Array,
    dL_dB: Array,
    two_pi: float = TWO_PI,
    *,
    accumulate: bool = False,
    scratch: Workspace | None = None,
) -> None:
    """dL_dB (d, features) = two_pi x^T (cos p dL_dphi_sin - sin p dL_dphi_cos) with p = two_pi x B, or added to it.

    ``scratch`` is a workspace whose batch is n: then nothing is allocated.
    """
    _check_fourier(dL_dphi, x, B)
    steps = _writing("dL_dB", dL_dB, {"x": x, "dL_dphi": dL_dphi, "B": B}, tuple(B.shape))
    take = None if scratch is None else scratch.buffers.part(0).take
    with current_device_of(dL_dB):
        steps.frequency_gradient(x, dL_dphi, B, dL_dB, two_pi, accumulate, take)


# ------------------------------------------------------------------------------------------------------------
# checks


def _writing(name: str, out: Array, given: dict[str, Array], shape: tuple[int, ...]) -> Primitives:
    """What writes into ``out``, after checking that it may be written and shares memory with no argument."""
    library = check_same_library([(name, out), *given.items()])
    if library.name not in WRITABLE:
        raise BackendError(
            f"{name}: {library.name} arrays cannot be written; the forms without out return new ones"
        )
    if tuple(out.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(out.shape)}; expected {shape}")
    for other, array in given.items():
        if dtype_name(array.dtype) != dtype_name(out.dtype):
            raise DtypeError(f"{other} is {dtype_name(array.dtype)}, {name} is {dtype_name(out.dtype)}")
        if shares_memory(out, array):
            raise ArgumentError(f"{name} shares memory with {other}; pass an array of its own")
    return primitives_for(library, device_kind(out, library.name))


def shares_memory(left: Array, right: Array) -> bool:
    """Whether the stretches of memory that two arrays lie in meet."""
    (a, b), (c, d) = _bounds(left), _bounds(right)
    return a < d and c < b


def _bounds(array: Array) -> tuple[int, int]:
    """First byte, and the byte after the last."""
    if 0 in array.shape:
        return 0, 0
    if hasattr(array, "data_ptr"):
        start, size = array.data_ptr(), array.element_size()
        strides = [step * size for step in array.stride()]
    else:
        size, strides = array.itemsize, list(array.strides)
        start = array.data.ptr if hasattr(array.data, "ptr") else array.__array_interface__["data"][0]
    reach = [(count - 1) * step for count, step in zip(array.shape, strides, strict=True)]
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + size


def _same_shape(name: str, array: Array, other: str, like: Array) -> None:
    if tuple(array.shape) != tuple(like.shape):
        raise ShapeError(f"{name} has shape {tuple(array.shape)}, {other} has {tuple(like.shape)}")


def _check_layer(dL_dh: Array, h: Array, h_prev: Array, W: Array) -> None:
    check_same_library([("W", W), ("dL_dh", dL_dh), ("h", h), ("h_prev", h_prev)])
    if len(W.shape) != 2 or len(dL_dh.shape) != 2 or dL_dh.shape[1] != W.shape[0]:
        raise ShapeError(
            f"dL_dh has shape {tuple(dL_dh.shape)}, W has {tuple(W.shape)}; expected (n, out), (out, in)"
        )
    _same_shape("h", h, "dL_dh", dL_dh)
    if tuple(h_prev.shape) != (dL_dh.shape[0], W.shape[1]):
        raise ShapeError(f"h_prev has shape {tuple(h_prev.shape)}; expected {(dL_dh.shape[0], W.shape[1])}")


def _check_fourier(dL_dphi: Array, x: Array, B: Array) -> None:
    check_same_library([("B", B), ("dL_dphi", dL_dphi), ("x", x)])
    if len(B.shape) != 2 or len(x.shape) != 2 or x.shape[1] != B.shape[0]:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}, B has {tuple(B.shape)}; expected (n, d), (d, features)"
        )
    if tuple(dL_dphi.shape) != (x.shape[0], 2 * B.shape[1]):
        raise ShapeError(
            f"dL_dphi has shape {tuple(dL_dphi.shape)}; expected {(x.shape[0], 2 * B.shape[1])}: sines, then cosines"
        )
