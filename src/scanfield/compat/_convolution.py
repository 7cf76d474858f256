"""The causal depthwise convolution in front of Mamba's scan, and the two functions of causal_conv1d under their own names.

Glossary (Gu and Dao, "Mamba", arXiv 2312.00752, figure 3; W the width of the convolution)
--------
x_t     ``x``       (batch, time, channels)      input
w_j     ``weight``  (channels, W)                w_(W-1) meets the present token
b       ``bias``    (channels,)                  optional
h       ``state``   (batch, W - 1, channels)     the last W - 1 inputs, oldest first

y_t = activation(b + sum_j w_j x_(t - W + 1 + j)): the convolution of ``scanfield.layers``, which torch and JAX differentiate.
"""

from __future__ import annotations

from typing import Any

import numpy

from scanfield.arrays import Array, Namespace, cast, library_of
from scanfield.compat import _arrays
from scanfield.errors import ArgumentError, ShapeError
from scanfield.layers import short_convolution


def causal_conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    initial_state: Array | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Any = None,
) -> tuple[Array, Array]:
    """Causal depthwise convolution over time: each channel with its own W weights, no look ahead.

    Parameters
    ----------
    x : array (batch, time, channels)
    weight : array (channels, W)
        The last weight meets the present token.
    bias : array (channels,), optional
    initial_state : array (batch, W - 1, channels), optional
        The inputs before the first token, oldest first; zeros if absent. With ``cu_seqlens`` one for each sequence.
    activation : None, "silu" or "swish"
    cu_seqlens : integers (sequences + 1,), optional
        Bounds of sequences packed into one row (batch 1); none reads another.

    Returns
    -------
    (output, final_state)
        ``output`` (batch, time, channels) and ``final_state`` (batch or sequences, W - 1, channels), the last
        inputs, both in the dtype of ``x``; the sum is taken in float32 at least.

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        For arrays that do not fit each other, integers, two libraries or devices, an unknown activation.

    Notes
    -----
    Gu and Dao, "Mamba" (arXiv 2312.00752), section 3.4.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.mamba_ssm import causal_conv1d
    >>> x = numpy.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    >>> output, state = causal_conv1d(x, numpy.array([[10.0, 1.0]]))
    >>> output.ravel(), state.ravel()
    (array([ 1., 12., 23.]), array([3.]))
    """
    check_activation(activation)
    if cu_seqlens is not None:
        _arrays.check_rank(x, "x", "batch time channels")
        cu_seqlens = _arrays.checked_bounds(cu_seqlens, *x.shape[:2])
    found = short_convolution.causal_conv1d(
        x,
        weight,
        bias,
        initial_state=initial_state,
        activation=None if activation is None else "silu",
        cu_seqlens=cu_seqlens,
    )
    return found.output, cast(library_of(x, "x").namespace, found.final_state, x.dtype)


def check_activation(activation: str | None) -> None:
    """ArgumentError for what is neither None nor SiLU."""
    if activation not in (None, "silu", "swish"):
        raise ArgumentError(f"activation: {activation!r}; allowed are None, 'silu' and 'swish'")


# ---------------------------------------------------------------------------------------------------------------------
# the names and layouts of the package causal_conv1d


def causal_conv1d_fn(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    seq_idx: Array | None = None,
    initial_states: Array | None = None,
    return_final_states: bool = False,
    final_states_out: Array | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Any = None,
) -> Any:
    """``causal_conv1d.causal_conv1d_fn``: the causal depthwise convolution with time last.

    Parameters
    ----------
    x : array (batch, channels, time)
    weight : array (channels, W)
    bias : array (channels,), optional
    seq_idx : integers (batch, time), optional
        Number of the sequence of each token; a sequence reads nothing before its first token.
    initial_states : array (batch, channels, W - 1), optional
        The inputs before each row; with ``seq_idx``, before its first sequence (upstream refuses the two together).
    return_final_states : bool
        Also return the last W - 1 inputs.
    final_states_out : array (batch, channels, W - 1), optional
        Where these are written, in place.
    activation : None, "silu" or "swish"
    cu_seqlens : integers (sequences + 1,), optional
        Not upstream: bounds of packed sequences; states are then one for each sequence.

    Returns
    -------
    array (batch, channels, time), or with ``return_final_states`` that and the states (batch, channels, W - 1)

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``causal_conv1d``; for both ``seq_idx`` and ``cu_seqlens``, and ``final_states_out`` without
        ``return_final_states``.

    Notes
    -----
    The interface of causal-conv1d 1.6. Any layout in memory is taken, and states have gradients.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.mamba_ssm import causal_conv1d_fn
    >>> causal_conv1d_fn(numpy.array([[[1.0, 2.0, 3.0]]]), numpy.array([[10.0, 1.0]]))
    array([[[ 1., 12., 23.]]])
    """
    _arrays.check_rank(x, "x", "batch channels time")
    xp = _arrays.namespace(x=x, initial_states=initial_states, final_states_out=final_states_out)
    if final_states_out is not None and not return_final_states:
        raise ArgumentError("final_states_out: given, but return_final_states is False")
    if seq_idx is not None and cu_seqlens is not None:
        raise ArgumentError("seq_idx: cu_seqlens cuts the row already; pass one of them")
    if initial_states is not None:
        _arrays.check_rank(initial_states, "initial_states", "batch channels width-1")
    batch, channels, time = x.shape
    rows = _arrays.time_second(xp, x)
    state = None if initial_states is None else _arrays.time_second(xp, initial_states)
    if seq_idx is None:
        y, final = causal_conv1d(rows, weight, bias, state, activation=activation, cu_seqlens=cu_seqlens)
    else:
        pack = _arrays.pack_of(seq_idx, batch, time)
        if state is not None and state.shape[0] != batch:
            raise ShapeError(f"initial_states: {state.shape[0]} states for a batch of {batch}")
        y, final = causal_conv1d(
            _arrays.folded(xp, rows), weight, bias, _arrays.spread_states(xp, state, pack),
            activation=activation, cu_seqlens=pack.bounds,
        )  # fmt: skip
        y = xp.reshape(y, (batch, time, channels))
        final = _arrays.take(xp, final, pack.last)
    y, final = _arrays.time_last(xp, y), _arrays.time_last(xp, final)
    if not return_final_states:
        return y
    if final_states_out is None:
        return y, final
    sizes = dict(zip(("rows", "channels", "time"), final.shape, strict=True))
    _arrays.check_shape(final_states_out, "final_states_out", **sizes)
    _arrays.write(final_states_out, final, "final_states_out")
    return y, final_states_out


def causal_conv1d_update(
    x: Array,
    conv_state: Array,
    weight: Array,
    bias: Array | None = None,
    activation: str | None = None,
    cache_seqlens: Array | None = None,
    conv_state_indices: Array | None = None,
) -> Array:
    """``causal_conv1d.causal_conv1d_update``: one token, or a few, after a state that is updated in place.

    Parameters
    ----------
    x : array (batch, channels) or (batch, channels, time)
    conv_state : array (batch, channels, S), S at least W - 1
        The last S inputs, oldest first; a ring with ``cache_seqlens``. Overwritten, in its own dtype.
    weight : array (channels, W)
    bias : array (channels,), optional
    activation : None, "silu" or "swish"
    cache_seqlens : integers (batch,), optional
        How many inputs each row has seen: ``conv_state`` is then a ring, and token i goes to (cache_seqlens + i)
        mod S.
    conv_state_indices : integers (batch,), optional
        Row i works on ``conv_state[conv_state_indices[i]]`` of a larger pool.

    Returns
    -------
    array of the shape of ``x``

    Raises
    ------
    BackendError
        For a state that cannot be changed in place (JAX, read-only NumPy); ``causal_conv1d`` returns its state
        instead.
    ShapeError, DtypeError, DeviceError, ArgumentError
        As ``causal_conv1d``; rows outside of the pool or named twice. Nothing is changed then.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.mamba_ssm import causal_conv1d_update
    >>> state = numpy.array([[[2.0]]])
    >>> causal_conv1d_update(numpy.array([[3.0]]), state, numpy.array([[10.0, 1.0]])), state
    (array([[23.]]), array([[[3.]]]))
    """
    _arrays.check_rank(x, "x", "batch channels", "batch channels time")
    _arrays.check_rank(conv_state, "conv_state", "batch channels state")
    _arrays.check_rank(weight, "weight", "channels width")
    xp = _arrays.namespace(x=x, conv_state=conv_state, weight=weight, bias=bias)
    _arrays.check_writable(conv_state, "conv_state")
    tokens = xp.expand_dims(x, axis=1) if len(x.shape) == 2 else _arrays.time_second(xp, x)
    batch, time, channels = tokens.shape
    pool, size, before = conv_state.shape[0], conv_state.shape[2], weight.shape[1] - 1
    rows = None
    if conv_state_indices is not None:
        rows = _arrays.check_rows(conv_state_indices, "conv_state_indices", batch, pool)
    wanted = {"batch": pool if rows is not None else batch, "channels": channels, "state": size}
    _arrays.check_shape(conv_state, "conv_state", **wanted)
    if size < before:
        raise ShapeError(
            f"conv_state: holds {size} inputs, a convolution of width {before + 1} needs {before}"
        )
    old = _arrays.time_second(xp, conv_state if rows is None else _arrays.take(xp, conv_state, rows))
    if cache_seqlens is None:
        line = xp.concat([cast(xp, old, x.dtype), tokens], axis=1)
        history, new = line[:, size - before : size, :], line[:, time:, :]
    else:
        history, new = _ring(xp, old, tokens, _arrays.host_tuple(cache_seqlens, "cache_seqlens"), before)
    y, _ = causal_conv1d(tokens, weight, bias, history, activation=activation)
    _arrays.write(conv_state, _arrays.time_last(xp, new), "conv_state", rows)
    return y[:, 0, :] if len(x.shape) == 2 else _arrays.time_last(xp, y)


def _ring(
    xp: Namespace, old: Array, tokens: Array, seen: tuple[int, ...], before: int
) -> tuple[Array, Array]:
    """The inputs before the tokens, and the ring after them; ``old`` (batch, S, channels) is a ring."""
    batch, size, channels = old.shape
    time = tokens.shape[1]
    if len(seen) != batch:
        raise ShapeError(f"cache_seqlens: {len(seen)} counts for a batch of {batch}")
    old = cast(xp, old, tokens.dtype)
    flat = xp.reshape(xp.concat([old, tokens], axis=1), (batch * (size + time), channels))
    row = numpy.arange(batch)[:, None] * (size + time)
    count = numpy.asarray(seen)[:, None]
    behind = row + (count + numpy.arange(-before, 0)[None, :]) % size if before else row[:, :0]
    after = row + numpy.arange(size)[None, :]
    for i in range(time):  # a later token overwrites an earlier one in the same slot
        numpy.put_along_axis(after, (count + i) % size, row + size + i, axis=1)
    history = xp.reshape(_arrays.take(xp, flat, behind.reshape(-1)), (batch, before, channels))
    return history, xp.reshape(_arrays.take(xp, flat, after.reshape(-1)), (batch, size, channels))
