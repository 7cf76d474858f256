"""flash-linear-attention's comba and gated_delta_product, and the rules that are not to be had, refused by name."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy

from scanfield.arrays import Array
from scanfield.compat import _arrays, _gates, _rule
from scanfield.errors import ArgumentError, BackendError
from scanfield.scans.delta_rule import comba
from scanfield.scans.gated_delta_product import gated_delta_product


def chunk_comba(
    q: Array,
    k: Array,
    v: Array,
    p: Array,
    g: Array,
    beta: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
) -> tuple[Any, ...]:
    """``fla.ops.comba.chunk_comba``: the gated delta rule that erases along a vector of its own.

    Parameters
    ----------
    q, k : arrays (batch, time, heads, K)
    v : array (batch, time, vheads, V)
        ``vheads`` a multiple of ``heads``.
    p : array (batch, time, heads, K) or None
        Direction along which is erased; k if None.
    g : array (batch, time, vheads)
        Natural logarithm of the decay.
    beta : array (batch, time, vheads), optional
        1 if absent.
    use_qk_l2norm_in_kernel : bool
        Normalise q, k **and p**.

    The other arguments, the results and the errors are those of ``chunk_gdn2``.

    Notes
    -----
    The interface of fla-core 0.6.0; Comba, arXiv 2506.02475, equation 6.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import chunk_comba
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> half = 0.5 * ones[..., 0]
    >>> chunk_comba(ones, ones, ones, ones, numpy.log(half), half)[0].ravel()
    array([0.5  , 0.625])
    """
    bounds = _rule.bounds_of(cu_seqlens, cu_seqlens_cpu)
    return _comba(
        q, k, v, p, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, bounds
    )


def fused_recurrent_comba(
    q: Array,
    k: Array,
    p: Array,
    v: Array,
    g: Array,
    beta: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
) -> tuple[Any, ...]:
    """``fla.ops.comba.fused_recurrent_comba``: as ``chunk_comba``, but **p stands before v**.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import fused_recurrent_comba
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> half = 0.5 * ones[..., 0]
    >>> fused_recurrent_comba(ones, ones, ones, ones, numpy.log(half), half)[0].ravel()
    array([0.5  , 0.625])
    """
    return _comba(
        q, k, v, p, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def _comba(
    q: Array,
    k: Array,
    v: Array,
    p: Array | None,
    g: Array,
    beta: Array | None,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    l2norm: bool,
    bounds: Any,
) -> tuple[Any, ...]:
    xp = _arrays.namespace(q=q, k=k, v=v, p=p, g=g, beta=beta, initial_state=initial_state)
    _rule.check_qkv(q, k, v, grouped=True)
    p = k if p is None else p
    batch, time, vheads, _ = v.shape
    _rule.check_gate_shape(p, "p", batch=batch, time=time, heads=k.shape[2], K=k.shape[3])
    _rule.check_gate_shape(g, "g", batch=batch, time=time, vheads=vheads)
    beta = xp.ones_like(v[..., 0]) if beta is None else beta
    _rule.check_gate_shape(beta, "beta", batch=batch, time=time, vheads=vheads)
    output, state = comba(
        q, k, v, _gates.unit(xp, p) if l2norm else p, g, beta, initial_state, scale=scale, qk_l2norm=l2norm,
        cu_seqlens=bounds,
    )  # fmt: skip
    return output, state if output_final_state else None


def chunk_gated_delta_product(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None,
    beta: Array,
    num_householder: int,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
) -> tuple[Any, ...]:
    """``fla.ops.gated_delta_product.chunk_gated_delta_product``: several delta-rule updates a token.

    Parameters
    ----------
    q : array (batch, time, heads, K)
    k : array (batch, time * num_householder, heads, K)
        The updates of a token are neighbours.
    v : array (batch, time * num_householder, vheads, V)
    g : array (batch, time, vheads) or None
        Natural logarithm of the decay, once a token; None is no decay.
    beta : array (batch, time * num_householder, vheads)
    num_householder : int
        Updates a token.
    cu_seqlens : integers (sequences + 1,), optional
        Bounds in tokens.

    The other arguments, the results and the errors are those of ``chunk_gdn2``. float32 is taken too.

    Notes
    -----
    The interface of fla-core 0.6.0; Siems et al., DeltaProduct, arXiv 2502.10297, section 3.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.fla import chunk_gated_delta_product
    >>> q, k = numpy.ones((1, 1, 1, 1)), numpy.ones((1, 2, 1, 1))
    >>> v, beta = numpy.array([1.0, 2.0]).reshape(1, 2, 1, 1), numpy.full((1, 2, 1), 0.5)
    >>> chunk_gated_delta_product(q, k, v, None, beta, 2)[0].ravel()
    array([1.25])
    """
    _rule.refuse("chunk_gated_delta_product", cp_context=cp_context)
    _check_count(num_householder)
    xp = _arrays.namespace(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    _arrays.check_rank(q, "q", "batch time heads K")
    _arrays.check_rank(k, "k", "batch time*num_householder heads K")
    _arrays.check_rank(v, "v", "batch time*num_householder vheads V")
    _arrays.check_rank(beta, "beta", "batch time*num_householder vheads")
    batch, time, heads, width = q.shape
    updates = {"batch": batch, "time*num_householder": time * num_householder}
    _rule.check_gate_shape(k, "k", **updates, heads=heads, K=width)
    _rule.check_gate_shape(v, "v", **updates, vheads=v.shape[2], V=v.shape[3])
    _rule.check_gate_shape(beta, "beta", **updates, vheads=v.shape[2])
    _rule.check_gate_shape(g, "g", batch=batch, time=time, vheads=v.shape[2])

    def parted(x: Array) -> Array:
        return xp.reshape(x, (batch, time, num_householder, *x.shape[2:]))

    output, state = gated_delta_product(
        q, parted(k), parted(v), g, parted(beta), initial_state, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=_rule.bounds_of(cu_seqlens, cu_seqlens_cpu),
    )  # fmt: skip
    return output, state if output_final_state else None


def _check_count(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | numpy.integer) or value < 1:
        raise ArgumentError(f"num_householder: {value!r}; allowed is an integer of at least 1")


# ---------------------------------------------------------------------------------------------------------------------
# not to be had: their transition is diagonal plus an outer product of two free vectors, which gdn2's is not


def _refuse(name: str, rule: str) -> NoReturn:
    raise BackendError(
        f"{name}: scanfield has no {rule} yet; its transition (diagonal plus an outer product of two free vectors) is no "
        "special case of gdn2. flash-linear-attention's own kernel needs a GPU"
    )


def chunk_dplr_delta_rule(*args: Any, **kwargs: Any) -> NoReturn:
    """``fla.ops.generalized_delta_rule.chunk_dplr_delta_rule``: not supported; raises BackendError."""
    _refuse("chunk_dplr_delta_rule", "dplr delta rule")


def fused_recurrent_dplr_delta_rule(*args: Any, **kwargs: Any) -> NoReturn:
    """``fla.ops.generalized_delta_rule.fused_recurrent_dplr_delta_rule``: not supported; raises BackendError."""
    _refuse("fused_recurrent_dplr_delta_rule", "dplr delta rule")


def chunk_rwkv7(*args: Any, **kwargs: Any) -> NoReturn:
    """``fla.ops.rwkv7.chunk_rwkv7``: not supported; raises BackendError."""
    _refuse("chunk_rwkv7", "rwkv7")


def fused_recurrent_rwkv7(*args: Any, **kwargs: Any) -> NoReturn:
    """``fla.ops.rwkv7.fused_recurrent_rwkv7``: not supported; raises BackendError."""
    _refuse("fused_recurrent_rwkv7", "rwkv7")
