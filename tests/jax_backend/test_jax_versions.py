"""What versions of JAX call by other names, and gradients of what nobody follows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.backend("jax")

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from scanfield_jax import lift  # noqa: E402


def test_axes_along_which_an_array_varies_have_several_names(monkeypatch):
    x = jnp.ones(2)
    assert lift.axes_of(x) == frozenset()  # by the name that this version has
    for kind in (SimpleNamespace(vma={"i"}), SimpleNamespace(mat=SimpleNamespace(varying=("i",)))):
        monkeypatch.setattr(lift.jax, "typeof", lambda x, kind=kind: kind)
        assert lift.axes_of(x) == {"i"}
    monkeypatch.setattr(lift.jax, "typeof", lambda x: SimpleNamespace())
    assert lift.axes_of(x) == frozenset()


def test_an_array_is_marked_as_varying_by_whatever_this_version_has(monkeypatch):
    x = jnp.ones(2)
    assert lift.vary(x, ()) is x
    monkeypatch.setattr(lift.lax, "pcast", lambda x, axes, to: ("pcast", axes, to), raising=False)
    monkeypatch.setattr(lift.lax, "pvary", lambda x, axes: ("pvary", axes), raising=False)
    assert lift.vary(x, ("i",)) == ("pcast", ("i",), "varying")
    monkeypatch.delattr(lift.lax, "pcast")
    assert lift.vary(x, ("i",)) == ("pvary", ("i",))


def test_no_cotangent_is_a_gradient_of_zero_and_no_array_has_none():
    def never(*_):
        raise AssertionError("nothing is to be pulled back")

    x = jnp.asarray([1.0, 2.0], "float32")
    found = lift.torch_rule(never, (x, None), (None, None))
    assert found[1] is None and found[0].dtype == x.dtype and not found[0].any()
    given = jnp.asarray([1 + 2j, 3j])
    one, other, none = lift.torch_rule(
        lambda d_output, d_state: (d_output * 2, None, None), (given, x, None), (given, None)
    )
    np.testing.assert_array_equal(one, 2 * given)  # conjugated on the way in, and on the way out
    assert none is None and not other.any()
