"""``causal_conv1d`` as a function: on a sequence, on one token, and with its pullback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scanfield.advice import shown
from scanfield.arrays import Array, cast, check_floating, check_same_library, dtype_of, widest
from scanfield.errors import ArgumentError, ShapeError
from scanfield.keywords import check_no_more
from scanfield.layers.convolution import Convolution, read_bounds
from scanfield.layers.elementary import sigmoid
from scanfield.layers.tape import Saved
from scanfield.scans.canonical import quiet
from scanfield.scans.packing import check_bounds
from scanfield.scans.surface import ScanResult


def causal_conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial_state: Array | None = None,
    activation: str | None = None,
    cu_seqlens: Any = None,
) -> ScanResult:
    """Convolve every channel with its own weights, looking back only.

    Parameters
    ----------
    x : array (batch, time, channels)
    weight : array (channels, width)
        ``weight[:, -1]`` meets the newest token.
    bias : array (channels,), optional
    initial_state : array (batch, width - 1, channels), optional
        The tokens before the first, the oldest first; zeros if absent. (sequences, ...) with ``cu_seqlens``.
    activation : {None, "silu"}
    cu_seqlens : integers (sequences + 1,), optional
        Bounds of sequences that are packed into one row; none sees another.

    Returns
    -------
    ScanResult
        ``output`` (batch, time, channels) in the dtype of x, and ``final_state`` in float32 at least.

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError
        For arrays that do not fit each other.
    ArgumentError
        For an unknown activation, or bounds on an accelerator.

    Notes
    -----
    Cross-correlation with zero padding in front, as ``torch.nn.Conv1d(groups=channels, padding=width - 1)`` cut to time.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.layers import causal_conv1d
    >>> x, weight = numpy.array([[[1.0], [2.0], [3.0]]]), numpy.array([[0.5, 1.0]])
    >>> causal_conv1d(x, weight).output[0, :, 0]
    array([1. , 2.5, 4. ])
    """
    return causal_conv1d_vjp(
        x, weight, bias, initial_state=initial_state, activation=activation, cu_seqlens=cu_seqlens
    )[0]


def causal_conv1d_step(
    state: Array | None,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
) -> tuple[Array, Array]:
    """One token of ``causal_conv1d``: ``(output, state)``; the given state is not changed.

    Parameters
    ----------
    state : array (batch, width - 1, channels) or None
    x : array (batch, channels)
    weight, bias, activation
        As in ``causal_conv1d``, and so are the errors.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.layers import causal_conv1d_step
    >>> weight, state = numpy.array([[0.5, 1.0]]), None
    >>> y, state = causal_conv1d_step(state, numpy.array([[1.0]]), weight)
    >>> causal_conv1d_step(state, numpy.array([[2.0]]), weight)[0]
    array([[2.5]])
    """
    xp = check_same_library([("x", x), ("weight", weight)], peers=True).namespace
    if x.ndim != 2:
        raise ShapeError(f"x: shape {tuple(x.shape)}, one token is (batch, channels)")
    result = causal_conv1d(
        xp.expand_dims(x, axis=1), weight, bias, initial_state=state, activation=activation
    )
    return xp.squeeze(result.output, axis=1), result.final_state


def causal_conv1d_vjp(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial_state: Array | None = None,
    activation: str | None = None,
    cu_seqlens: Any = None,
) -> tuple[ScanResult, Callable[..., dict[str, Array]]]:
    """``causal_conv1d`` and its pullback: ``pullback(d_output=None, d_final_state=None)`` gives gradients by name.

    Parameters, errors
        As in ``causal_conv1d``; the pullback raises ArgumentError without cotangents, ShapeError for one that does not fit.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.layers import causal_conv1d_vjp
    >>> x, weight = numpy.array([[[1.0], [2.0], [3.0]]]), numpy.array([[0.5, 1.0]])
    >>> _, pullback = causal_conv1d_vjp(x, weight)
    >>> pullback(numpy.ones((1, 3, 1)))["weight"]
    array([[3., 6.]])
    """
    given = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}
    library = check_same_library(
        [(name, array) for name, array in given.items() if array is not None], peers=True
    )
    xp = library.namespace
    if activation not in (None, "silu"):
        raise ArgumentError(f"activation: {shown(activation)}; allowed are None and 'silu'")
    names = [check_floating(a, name, complex_allowed=False) for name, a in given.items() if a is not None]
    for name, rank, axes in (("x", 3, "(batch, time, channels)"), ("weight", 2, "(channels, width)")):
        if given[name].ndim != rank:
            raise ShapeError(f"{name}: shape {tuple(given[name].shape)}, must be {axes}")
    if tuple(weight.shape) != (x.shape[2], weight.shape[1]) or weight.shape[1] < 1:
        raise ShapeError(
            f"weight: shape {tuple(weight.shape)}, must be (channels, width) with the {x.shape[2]} channels of x and a width "
            "of at least 1"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ShapeError(f"bias: shape {tuple(bias.shape)}, must be ({weight.shape[0]},) (channels,)")
    bounds = read_bounds(cu_seqlens)
    check_bounds(bounds, x.shape[0], x.shape[1])
    dtype = dtype_of(xp, widest(names))
    arrays = tuple([None if a is None else cast(xp, a, dtype) for a in given.values()])
    function = Convolution(bounds)
    with quiet(library.name):
        outputs = function.forward(xp, *arrays)
        sigma = sigmoid(xp, outputs[0]) if activation == "silu" else None
        y = outputs[0] if sigma is None else outputs[0] * sigma
    result = ScanResult(cast(xp, y, x.dtype), outputs[1])

    def pullback(
        d_output: Array | None = None, d_final_state: Array | None = None, *more: Any, **others: Any
    ) -> dict[str, Array]:
        check_no_more("pullback", ("d_output", "d_final_state"), more, others)
        if d_output is None and d_final_state is None:
            raise ArgumentError("pullback: d_output or d_final_state is needed, both are None")
        for name, d, like in (("d_output", d_output, y), ("d_final_state", d_final_state, outputs[1])):
            if d is not None:
                check_same_library([("x", x), (name, d)])
                if tuple(d.shape) != tuple(like.shape):
                    raise ShapeError(
                        f"{name}: shape {tuple(d.shape)}, but the result has {tuple(like.shape)}"
                    )
        with quiet(library.name):
            d_y, d_last = (None if d is None else cast(xp, d, dtype) for d in (d_output, d_final_state))
            if sigma is not None and d_y is not None:
                d_y = d_y * (sigma * (1 + outputs[0] * (1 - sigma)))
            wanted = tuple(array is not None for array in arrays)
            grads = function.backward(xp, Saved(arrays, outputs, None), (d_y, d_last), wanted)
        return {
            name: cast(xp, grad, array.dtype)
            for (name, array), grad in zip(given.items(), grads, strict=True)
            if array is not None and grad is not None
        }

    return result, pullback
