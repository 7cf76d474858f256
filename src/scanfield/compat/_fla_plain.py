"""flash-linear-attention's rules without gates: retention and linear_attn, in both forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scanfield.arrays import HALF, Array, Namespace, cast, dtype_name, ones, zeros
from scanfield.compat import _arrays, _rule
from scanfield.errors import ArgumentError
from scanfield.scans.linear_attention import retention


def chunk_retention(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.retention.chunk_retention``: head h decays by 1 - 2^(-5 - h) at every token.

    The arguments, results and errors are those of ``chunk_gla`` without ``g``; of further keywords ``chunk_size``
    alone.

    Notes
    -----
    The interface of fla-core 0.6.0; Sun et al., "Retentive Network" (arXiv 2307.08621), equations 5 and 6.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import chunk_retention
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> chunk_retention(ones, ones, ones)[0].ravel()
    array([1.     , 1.96875])
    """
    words = _rule.read_words("chunk_retention", kwargs, "chunk_size")
    return _retention(
        q, k, v, scale, initial_state, output_final_state, False, False, cu_seqlens, words.chunk_size
    )


def fused_recurrent_retention(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """``fla.ops.retention.fused_recurrent_retention``: as ``chunk_retention``; ``reverse`` runs time backwards.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import fused_recurrent_retention
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> fused_recurrent_retention(ones, ones, ones, reverse=True)[0].ravel()
    array([1.96875, 1.     ])
    """
    words = _rule.read_words(
        "fused_recurrent_retention", kwargs, "transpose_state_layout", state_v_first=state_v_first
    )
    return _retention(
        q, k, v, scale, initial_state, output_final_state, reverse, words.state_v_first, cu_seqlens, None
    )


def _retention(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    reverse: bool,
    state_v_first: bool,
    bounds: Any,
    chunk_size: int | None,
) -> tuple[Any, ...]:
    # The decay goes by head, so heads must be the same ones.
    xp = _rule.fitted(q, k, v, {}, initial_state, grouped=False)
    output, state = retention(
        q, k, v, None, _rule.turned(xp, initial_state, state_v_first), scale=scale, reverse=reverse, cu_seqlens=bounds,
        chunk_size=chunk_size,
    )  # fmt: skip
    return output, _rule.turned(xp, state, state_v_first) if output_final_state else None


# ---------------------------------------------------------------------------------------------------------------------
# no decay


def chunk_linear_attn(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Any = None,
) -> tuple[Any, ...]:
    """``fla.ops.linear_attn.chunk_linear_attn``: linear attention, over its sum of weights unless ``normalize=False``.

    Parameters
    ----------
    initial_state : array, or with ``normalize`` a pair of arrays, optional
        The state (rows, heads, K, V) and the sum of keys before the first token (rows, 1, heads, K).
    normalize : bool
        Divide by <scale q, sum of keys> + 1e-10.

    The other arguments and the errors are those of ``chunk_gla`` without ``g``.

    Returns
    -------
    (output, final state or None), with ``normalize`` (output, (final state or None, sum of keys))

    Notes
    -----
    The interface of fla-core 0.6.0; Katharopoulos et al., arXiv 2006.16236, equations 16 to 18.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import chunk_linear_attn
    >>> ones, v = numpy.ones((1, 3, 1, 1)), numpy.arange(3.0).reshape(1, 3, 1, 1)
    >>> chunk_linear_attn(ones, ones, v)[0].ravel().round(6)
    array([0. , 0.5, 1. ])
    """
    return _linear(q, k, v, scale, initial_state, output_final_state, False, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Any = None,
) -> tuple[Any, ...]:
    """``fla.ops.linear_attn.fused_recurrent_linear_attn``: as the chunk form, but not normalised unless asked.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import fused_recurrent_linear_attn
    >>> ones = numpy.ones((1, 3, 1, 1))
    >>> fused_recurrent_linear_attn(ones, ones, ones, reverse=True)[0].ravel()
    array([3., 2., 1.])
    """
    return _linear(q, k, v, scale, initial_state, output_final_state, reverse, normalize, cu_seqlens)


def _linear(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None,
    initial_state: Any,
    output_final_state: bool,
    reverse: bool,
    normalize: bool,
    bounds: Any,
) -> tuple[Any, ...]:
    pair = initial_state if isinstance(initial_state, tuple) else (initial_state,)
    if len(pair) > 2 or (len(pair) == 2 and not normalize):
        raise ArgumentError(
            f"initial_state: a tuple of {len(pair)}; a pair (state, sum of keys) goes with normalize=True, else one array"
        )
    xp = _arrays.namespace(q=q, k=k, v=v, initial_state=pair[0], sum_of_keys=pair[-1])
    _rule.check_qkv(q, k, v, grouped=False)

    def call(q: Array, k: Array, v: Array, state: Array | None) -> tuple[Any, ...]:
        return _rule.run(
            xp, q, k, v, None, scale=scale, initial_state=state, output_final_state=True, bounds=bounds,
            reverse=reverse,
        )  # fmt: skip

    if not normalize:
        output, state = call(q, k, v, pair[0])
        return output, state if output_final_state else None
    output, (state, sums) = _normalised(xp, call, q, k, v, initial_state)
    return output, (state if output_final_state else None, sums)


def _normalised(
    xp: Namespace,
    call: Callable[..., tuple[Any, ...]],
    q: Array,
    k: Array,
    v: Array,
    initial_state: Any,
) -> tuple[Array, tuple[Array | None, Array]]:
    """Linear attention over its sum of weights, with that sum's state (rows, 1, heads, K).

    The denominators are one more column of values, all ones, so they share the pass, packs and direction.
    """
    state, sums = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    batch, time, heads, width = v.shape
    one = ones(xp, (batch, time, heads, 1), v.dtype, v)
    both = None
    if state is not None or sums is not None:
        if state is None:
            state = zeros(xp, (sums.shape[0], heads, k.shape[-1], width), sums.dtype, v)
        column = (
            xp.zeros_like(state[..., :1])
            if sums is None
            else xp.permute_dims(cast(xp, sums, state.dtype), (0, 2, 3, 1))
        )
        both = xp.concat([state, column], axis=-1)
    # Denominators in half precision would round twice.
    wide = _arrays.wide(xp, q) if dtype_name(q.dtype) in HALF else q
    y, last = call(wide, k, xp.concat([v, one], axis=-1), both)
    output = y[..., :width] / (y[..., width:] + 1e-10)
    return cast(xp, output, q.dtype), (last[..., :width], xp.permute_dims(last[..., width:], (0, 3, 1, 2)))
