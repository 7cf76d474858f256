"""The devices of a mesh axis as a line along which states travel, each device's rows of states, and the exchange.

All devices run one program, so that where a sequence enters or leaves a device is data: masks over the rows of states.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import jax.numpy as jnp
import numpy
from jax import lax

from scanfield.affine import Affine, advance, compose

Array = Any
Exchange = Literal["scan", "gather"]


class Line(NamedTuple):
    """The devices in the order of the walk."""

    axis: str
    size: int
    reverse: bool

    def place(self) -> Array:
        """Where this device stands along the walk."""
        rank = lax.axis_index(self.axis)
        return self.size - 1 - rank if self.reverse else rank

    def rank(self, place: int) -> int:
        """The device at a place."""
        return self.size - 1 - place if self.reverse else place

    def turned(self) -> Line:
        """The line backwards."""
        return self._replace(reverse=not self.reverse)

    def shifted(self, x: Array, distance: int) -> Array:
        """The array of the device so many places before; zeros where there is none."""
        pairs = [(self.rank(i), self.rank(i + distance)) for i in range(self.size - distance)]
        return cast(Any, lax).ppermute(x, self.axis, pairs)


class Bounds(NamedTuple):
    """Bounds of a pack along the walk, (sequences + 1,) each: the place that holds a bound, and its token there.

    Two numbers in the place of one, which 32 bits need not hold.
    """

    place: Array
    token: Array


def bounds_along(cu_seqlens: Any, tokens: int, line: Line, stretch: int) -> Bounds:
    """Bounds in the whole as places along the walk, ``tokens`` a device, each of ``stretch`` canonical ones."""
    xp: Any = jnp if isinstance(cu_seqlens, jnp.ndarray) else numpy
    whole = cu_seqlens if xp is jnp else numpy.asarray(cu_seqlens, dtype=numpy.int64)
    place, token = whole // max(tokens, 1), whole % max(tokens, 1)
    if line.reverse:
        place, token = (xp.flip(x) for x in (place, token))
        place = line.size - place - (token > 0)
        token = xp.where(token > 0, tokens - token, 0)
    return Bounds(*(jnp.asarray(x.astype(numpy.int32)) for x in (place, token * stretch)))


class Rows(NamedTuple):
    """Which of a device's states come in, go on and end here: masks (rows,). A batch does so as one, in a pack one does."""

    bounds: Array | None
    """Of all sequences in this device's tokens: those of others are empty here. None for a batch."""
    enters: Array
    leaves: Array
    ended: Array
    before: Array
    """Along the walk, the first place of the sequence that comes in."""
    behind: Array
    """Backwards along the walk, the first place of the one that goes on."""

    def take(self, states: Array, which: Array) -> Array:
        """The states under a mask: all of a batch, one of a pack."""
        if self.bounds is None:
            return states
        return lax.dynamic_index_in_dim(states, jnp.argmax(which), 0)


def rows_of(line: Line, count: int, bounds: Bounds | None, tokens: int) -> Rows:
    """The rows of this device."""
    place = line.place()
    if bounds is None:
        whole = jnp.ones(count, bool)
        enters, leaves = whole & (place > 0), whole & (place < line.size - 1)
        return Rows(None, enters, leaves, ~leaves, jnp.asarray(0), jnp.asarray(0))
    at, token = bounds
    local = jnp.where(at < place, 0, jnp.where(at > place, tokens, token))

    def later(edge: Array) -> Array:
        """Whether each bound stands behind the first token of a place."""
        return (at > edge) | ((at == edge) & (token > 0))

    enters = (at[:-1] < place) & later(place)[1:]
    leaves = (at[:-1] <= place) & later(place + 1)[1:]
    empty = (at[:-1] == at[1:]) & (token[:-1] == token[1:])
    ended = jnp.where(empty, place == 0, (local[1:] > local[:-1]) & ~leaves)
    last = (at - (token == 0))[1:]
    before, behind = at[jnp.argmax(enters)], line.size - 1 - last[jnp.argmax(leaves)]
    return Rows(local, enters, leaves, ended, before, behind)


def put(states: Array, which: Array, new: Array) -> Array:
    """States with those under a mask replaced."""
    return jnp.where(which.reshape(-1, *(1 for _ in states.shape[1:])), new, states)


def incoming(
    line: Line, exchange: Exchange, transition: Array | None, state: Array, diagonal: bool, first: Array
) -> Array:
    """What comes into each device of the sequence that enters it, from the maps of the devices before it.

    At place ``first``, where that sequence begins, ``state`` is the state itself. Anything where nothing enters.
    """
    place = line.place()
    block = Affine(transition, state, diagonal)
    if exchange == "gather":
        states = lax.all_gather(state, line.axis)
        transitions = None if transition is None else lax.all_gather(transition, line.axis)
        found = states[line.rank(0)]
        for i in range(1, line.size - 1):
            own = states[line.rank(i)]
            moved = advance(Affine(cast(Any, transitions)[line.rank(i)], own, diagonal), found)
            found = jnp.where(place > i, jnp.where(first < i, moved, own), found)
        return found
    held, reach = _shifted(line, block, 1), 1
    while 2 * reach < line.size - 1:
        further = compose(_shifted(line, held, reach), held)
        whole = place - reach <= first
        held = Affine(
            jnp.where(whole, held.transition, further.transition),
            jnp.where(whole, held.state, further.state),
            diagonal,
        )
        reach *= 2
    if reach >= line.size - 1:
        return held.state
    # Nobody goes on from the last round: of what came from further, the state is enough.
    further = advance(held, line.shifted(held.state, reach))
    return jnp.where(place - reach <= first, held.state, further)


def _shifted(line: Line, block: Affine, distance: int) -> Affine:
    transition = None if block.transition is None else line.shifted(block.transition, distance)
    return block._replace(transition=transition, state=line.shifted(block.state, distance))
