"""A training set over the ranks of a group: the reducer of ``scanfield.pinn.train`` on ``torch.distributed``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from scanfield.errors import BackendError
from scanfield.pinn.network import Network
from scanfield.pinn.reduce import Part, Shares
from scanfield_torch.parallel.agreement import Description, agree
from scanfield_torch.parallel.link import Link, check_timeout

Tensor = torch.Tensor


class GroupReducer:
    """Each rank of a group holds a share of the points; sums travel by all-reduce.

    Every rank calls ``pinn.train`` with the same problem, network and settings, on tensors. Parameters, and with them
    results, decisions and history, are the same bits on all of them.

    Parameters
    ----------
    group : ProcessGroup, optional
        The default group, if absent.
    timeout : float, optional
        Seconds that one wait may take; the group's own limit if absent.

    Raises
    ------
    ArgumentError
        For a timeout out of range; by the training, where ranks differ in network, settings or points, with what differs.
    BackendError
        By the training, for a network of another library's arrays.
    StateError
        By the training, without a process group and where a rank does not answer or has died, with its number.

    Notes
    -----
    Exchanged for each iteration: parameters + 1 numbers for Adam and each evaluation of L-BFGS; parameters (parameters + 1)
    for Levenberg-Marquardt, and one for each step that it tries.

    Examples
    --------
    >>> from scanfield_torch.parallel import GroupReducer
    >>> GroupReducer(timeout=30.0).timeout
    30.0
    """

    def __init__(self, group: Any = None, *, timeout: float | None = None) -> None:
        check_timeout(timeout)
        self.group, self.timeout = group, timeout

    def build(
        self, network: Network, make: Callable[[int, int, Network], Part], told: Sequence[str]
    ) -> Shares:
        """The share of this rank, once all ranks are known to train the same."""
        vector = network.flatten()
        link = Link(self.group, self.timeout, "pinn.train", [vector])

        def local() -> tuple[Part, int, Description]:
            if not isinstance(vector, Tensor):
                raise BackendError(
                    f"network: arrays of {type(vector).__module__}; over a group it is made of tensors, "
                    "Network.create(..., xp=torch)"
                )
            link.check_devices([("network", vector)])
            digest = hashlib.sha256(vector.detach().cpu().numpy().tobytes()).hexdigest()[:8]
            rows = [("network", f"{network.dtype} ({network.size} parameters) #{digest}")]
            rows += [(f"points {i}", words) for i, words in enumerate(told)]
            return make(link.rank, link.size, network), 0, rows

        return _Group(link, agree(link, local)[0])


class _Group:
    def __init__(self, link: Link, part: Part) -> None:
        self._link, self._part = link, part

    def total(self, part: str, x: Tensor) -> Tensor:
        with torch.no_grad():
            own = cast(Tensor, getattr(self._part, part)(x))
            return self._link.total(own.clone(), f"the sum of {part.replace('_', ' ')}")
