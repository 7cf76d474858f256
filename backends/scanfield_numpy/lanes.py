"""Vectors at the edge of an array, where not all lanes are there."""

from __future__ import annotations

from scanfield_numpy.compiling import part
from scanfield_numpy.vector import lanes, load, load_first, store, store_first


@part
def first_lanes(place, offset, count, tag):
    """A vector of which ``count`` lanes are there; zeros in the others."""
    if count >= lanes(place, tag):
        return load(place, offset, tag)
    return load_first(place, offset, count, tag)


@part
def put_lanes(place, offset, count, x, tag):
    """Write the first ``count`` lanes of a vector."""
    if count >= lanes(place, tag):
        store(place, offset, x)
    else:
        store_first(place, offset, count, x)
