"""Arguments of other projects' functions that do not fit each other, and options that their callers rarely give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scanfield.compat import fla, mamba_ssm
from scanfield.errors import ArgumentError, ShapeError

pytestmark = pytest.mark.backend("numpy")

DRAW = np.random.default_rng(8)
X, WEIGHT = DRAW.standard_normal((2, 3, 5)), DRAW.standard_normal((3, 4))
SEQ_IDX = np.asarray([[0, 0, 0, 1, 1]] * 2)


def test_sequences_told_twice_or_states_for_another_batch():
    state = np.zeros((3, 3, 3))
    with pytest.raises(ArgumentError, match="seq_idx: cu_seqlens cuts the row already"):
        mamba_ssm.causal_conv1d_fn(X, WEIGHT, seq_idx=SEQ_IDX, cu_seqlens=[0, 5])
    with pytest.raises(ShapeError, match="initial_states: 3 states for a batch of 2"):
        mamba_ssm.causal_conv1d_fn(X, WEIGHT, seq_idx=SEQ_IDX, initial_states=state)
    with pytest.raises(ArgumentError, match="final_states_out: given, but return_final_states is False"):
        mamba_ssm.causal_conv1d_fn(X, WEIGHT, final_states_out=state)


def test_final_states_of_a_convolution_are_written_where_they_are_wanted():
    want, states = mamba_ssm.causal_conv1d_fn(X, WEIGHT, return_final_states=True)
    room = np.full((2, 3, 3), np.nan)
    found, given = mamba_ssm.causal_conv1d_fn(X, WEIGHT, return_final_states=True, final_states_out=room)
    assert given is room and np.array_equal(room, states) and np.array_equal(found, want)
    untouched = np.zeros((2, 3, 4))
    with pytest.raises(ShapeError, match="final_states_out"):
        mamba_ssm.causal_conv1d_fn(X, WEIGHT, return_final_states=True, final_states_out=untouched)
    assert not untouched.any()


def test_a_convolution_of_one_token_on_rows_of_a_pool():
    pool = DRAW.standard_normal((4, 3, 3))
    rows, want = np.asarray([2, 0]), pool[[2, 0]]
    alone, other = want.copy(), pool.copy()
    found = mamba_ssm.causal_conv1d_update(X[:, :, 0], pool, WEIGHT, conv_state_indices=rows)
    np.testing.assert_array_equal(found, mamba_ssm.causal_conv1d_update(X[:, :, 0], alone, WEIGHT))
    assert np.array_equal(pool[[2, 0]], alone) and np.array_equal(pool[[1, 3]], other[[1, 3]])
    with pytest.raises(ShapeError, match="cache_seqlens: 3 counts for a batch of 2"):
        mamba_ssm.causal_conv1d_update(X[:, :, 0], alone, WEIGHT, cache_seqlens=[1, 2, 3])


def test_states_of_an_update_are_those_of_its_batch():
    state, x = np.zeros((3, 4, 2)), np.ones((2, 4))
    A, B = -np.ones((4, 2)), np.ones((2, 2))
    with pytest.raises(ShapeError, match=r"state: 3 states for a batch of 2 \(x \(2, 4\)\)"):
        mamba_ssm.selective_state_update(state, x, x, A, B, B)
    assert not state.any()


def test_a_chunk_size_that_upstream_needs():
    x, dt = np.ones((1, 3, 1, 1)), np.ones((1, 3, 1))
    with pytest.raises(ArgumentError, match="chunk_size: None; an integer of at least 1 is needed"):
        mamba_ssm.mamba_chunk_scan_combined(x, dt, -np.ones(1), x, x, None)


def test_no_beta_is_one_and_no_sigmoid_of_it():
    """Whatever is asked to be done with a beta that is not there."""
    q, k, v = (DRAW.standard_normal((1, 4, 2, 3)) for _ in range(3))
    g = -DRAW.random((1, 4, 2))
    options: dict[str, Any] = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    want, _ = fla.chunk_gated_delta_rule(q, k, v, g, np.ones((1, 4, 2)))
    found, _ = fla.chunk_gated_delta_rule(q, k, v, g, None, **options)
    np.testing.assert_allclose(found, want, rtol=1e-13)
