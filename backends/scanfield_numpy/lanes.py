"""Vectors at the edge of an array, where not all lanes are there."""

from __future__ import annotations

from scanfield_numpy.vector import first_lanes, put_lanes

__all__ = ["first_lanes", "put_lanes"]
