"""The state that comes into each shard, from the maps of the shards before it: an exclusive scan over ranks.

| exchange | messages | bytes that a rank receives, P for a state and Q for a map (M and N) |
|---|---|---|
| ``"gather"`` | one all-gather | (size - 1) Q; (size - 1) P where no shard lies between two others |
| ``"scan"`` | 1 + ceil(log2(before)) rounds | P or Q a round: Q until what arrives begins at the first shard |

Both fold from the left in the order of the walk. In ``"scan"`` (Hillis and Steele, Data parallel algorithms, CACM 29,
1986, with the chains of a pack as segments) a shard's map begins as its neighbour's and doubles its reach each round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from scanfield.affine import Affine, advance, compose
from scanfield.errors import ArgumentError
from scanfield.shards import Place, sources
from scanfield_torch.parallel.link import Link

Tensor = torch.Tensor

Exchange = Literal["scan", "gather"]
EXCHANGES: tuple[Exchange, ...] = ("scan", "gather")


class Element(NamedTuple):
    """What a shard sends on: a map, or a state alone."""

    transition: Tensor | None
    state: Tensor


def check_exchange(exchange: str) -> Exchange:
    """ArgumentError for one that there is not."""
    for known in EXCHANGES:
        if exchange == known:
            return known
    raise ArgumentError(f"exchange: {exchange!r}; allowed are {', '.join(map(repr, EXCHANGES))}")


def incoming(
    link: Link,
    ranks: Sequence[int],
    walk: Sequence[Place],
    mine: Element | None,
    like: Affine,
    exchange: Exchange,
    *,
    backward: bool,
) -> Tensor | None:
    """The state that comes in (backward: the cotangent of the one that goes out), or None where none does.

    ``walk`` are the places in the order of the walk and ``ranks`` their ranks; ``like`` is any map of this group.
    """
    what = f"the exchange of {'cotangents (backward)' if backward else 'states (forward)'}"
    # Along the direction of the messages: backward, the last shard of the walk is the first.
    order = list(range(len(walk)))[:: -1 if backward else 1]
    chains = [len(sources(walk, place, backward=backward)) for place in order]
    if not any(chains):
        return None
    here = next(i for i, place in enumerate(order) if ranks[place] == link.rank)
    peers = [ranks[place] for place in order]
    run = _gather if exchange == "gather" else _scan
    return run(link, peers, chains, here, mine, like, what)


def _gather(
    link: Link,
    peers: Sequence[int],
    chains: Sequence[int],
    here: int,
    mine: Element | None,
    like: Affine,
    what: str,
) -> Tensor | None:
    maps = max(chains) > 1
    sent = _packed(mine, like, maps)
    parts = link.gather(sent, what)
    state: Tensor | None = None
    for i in range(here - chains[here], here):
        part = _unpacked(parts[peers[i]], like, maps)
        state = part.state if state is None else advance(part, state)
    return state


def _scan(
    link: Link,
    peers: Sequence[int],
    chains: Sequence[int],
    here: int,
    mine: Element | None,
    like: Affine,
    what: str,
) -> Tensor | None:
    size, chain = len(peers), chains[here]
    held: Affine | None = None
    # The neighbour's own element; then, round by round, what those at twice the distance hold.
    distance = 1
    for reach in _reaches(max(chains)):
        first = reach == 0
        distance = 1 if first else reach
        sends, receives = [], []
        to = here + distance
        if to < size and chains[to] > reach:
            whole = chains[to] - distance <= reach if not first else chains[to] == 1
            element = mine if first else None if held is None else Element(held.transition, held.state)
            sends.append((peers[to], _packed(element, like, not whole)))
        arriving: Tensor | None = None
        if chain > reach:
            whole = chain - distance <= reach if not first else chain == 1
            arriving = torch.empty_like(_packed(None, like, not whole))
            receives.append((peers[here - distance], arriving))
        link.swap(sends, receives, what)
        if arriving is not None:
            part = _unpacked(arriving, like, not whole)
            if held is None:
                held = part
            elif whole:
                held = held._replace(state=advance(held, part.state))
            else:
                held = compose(part, held)
    return None if held is None else held.state


def _reaches(longest: int) -> list[int]:
    """What each round builds upon: nothing, then 1, 2, 4, ... elements, while a chain is longer."""
    found, reach = [0], 1
    while reach < longest:
        found.append(reach)
        reach *= 2
    return found


def _packed(element: Element | None, like: Affine, maps: bool) -> Tensor:
    """One flat tensor of a state, or of a map; zeros where there is nothing to tell."""
    state = like.state if element is None else element.state.to(like.state.dtype)
    if not maps:
        return state.reshape(-1)
    transition = torch.zeros_like(like.transition)
    if element is not None and element.transition is not None:
        transition = element.transition
    return torch.cat([transition.broadcast_to(like.transition.shape).reshape(-1), state.reshape(-1)])


def _unpacked(flat: Tensor, like: Affine, maps: bool) -> Affine:
    if like.state.is_complex() and not flat.is_complex():
        flat = torch.view_as_complex(flat)
    count = like.transition.numel() if maps else 0
    transition = flat[:count].view(like.transition.shape) if maps else like.transition
    return Affine(transition, flat[count:].view(like.state.shape), like.diagonal)
