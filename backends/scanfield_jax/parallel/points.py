"""A training set over the devices of a process: the reducer of ``scanfield.pinn.train`` on JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from scanfield.errors import ArgumentError

Array = Any


class DeviceReducer:
    """The reducer of ``scanfield.pinn.train`` on JAX: each device holds a share of the points.

    Parameters
    ----------
    devices : sequence of jax.Device, optional
        All devices of this process, if absent. The network's parameters stay where they are.

    Raises
    ------
    ArgumentError
        For no device.

    Examples
    --------
    >>> import jax
    >>> from scanfield_jax.parallel import DeviceReducer
    >>> DeviceReducer(jax.devices()[:1]).size
    1
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        self.devices = tuple(jax.local_devices() if devices is None else devices)
        self.size = len(self.devices)
        if not self.size:
            raise ArgumentError("devices: none; at least one is needed")

    def build(self, network: Any, make: Any, told: Sequence[str]) -> Any:
        """A share on each device."""
        parts = []
        for shard, device in enumerate(self.devices):
            with jax.default_device(device):
                there = network.replace(
                    {name: jax.device_put(x, device) for name, x in network.parameters.items()}
                )
                parts.append(make(shard, self.size, there))
        return _OnDevices(self.devices, parts)


class _OnDevices:
    def __init__(self, devices: Sequence[Any], parts: Sequence[Any]) -> None:
        self._devices, self._parts = devices, parts

    def total(self, part: str, x: Array) -> Array:
        """All devices are asked before the first answer is waited for."""
        found = [
            getattr(own, part)(jax.device_put(x, device))
            for device, own in zip(self._devices, self._parts, strict=True)
        ]
        home = next(iter(x.devices()))
        total = jax.device_put(found[0], home)
        for other in found[1:]:
            total = total + jax.device_put(other, home)
        return total
