"""A layer of ``scanfield.layers`` as a ``torch.nn.Module``: torch holds the parameters, the layer says what is computed.

There is no second copy of the mathematics. A module keeps its layer without arrays; a call reads the tensors from the tree
of modules, where torch's tools (optimizers, ``.to``, ``requires_grad_``, parametrizations, DDP) find and change them, and
runs the layer on them. Gradients are autograd's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from scanfield import layers
from scanfield.arrays import dtype_name
from scanfield.errors import ArgumentError
from scanfield.layers.checkpoint import host, upstream
from scanfield.layers.convolution import read_bounds
from scanfield.layers.layer import check_token
from scanfield.layers.tape import joined
from scanfield_torch.nn.chance import Draw, draws, numbers, untouched

Tensor = torch.Tensor


class Module(torch.nn.Module):
    """Any layer of ``scanfield.layers``, your own among them, as a module.

    Parameters
    ----------
    layer : Layer
        What is computed. One that has parameters, of any library, hands them over as copies; otherwise they are drawn.
    seed : int, optional
        Of the draws; torch's own generator gives one if it is absent.
    device, dtype
        Of the parameters, those of modules inside too, as in ``torch.nn``; torch's defaults, or what the layer's own have.
    scheme : {"uniform", "normal", "mamba_ssm", "zeros"}
        As in ``layer.init``.

    Raises
    ------
    ArgumentError, DtypeError
        As the layer and its ``init``.

    Notes
    -----
    Parameters and modules bear the names of the layer, which below a mixer are those of mamba_ssm, transformers and
    flash-linear-attention. A module inside another computes when it is called itself; its parent reads its tensors and does
    not call it, so hooks belong on the module that is called.

    A module that is given to another one, as a mixer to a ``LanguageModel``, hands over its parameters themselves.
    ``device`` and ``dtype`` of the outer one convert them in place; its ``seed`` or ``scheme`` draws them anew, so that
    the whole has the numbers of the layer's ``init``. What has numbers of its own keeps them: a module made with a seed
    or scheme, or of a layer that had arrays, or changed since (trained, loaded, set). All of this is seen wherever else the
    module stands, in an earlier model too.

    Examples
    --------
    >>> import torch
    >>> from scanfield import layers
    >>> from scanfield_torch import nn
    >>> gate = nn.Module(layers.Sequential(layers.Linear(3, 4), layers.Activated("silu")), seed=0)
    >>> gate(torch.ones(1, 5, 3)).shape
    torch.Size([1, 5, 4])
    """

    layer_class: ClassVar[type[layers.Layer] | None] = None
    """The layer that a class of modules is of; None for ``Module`` itself, which is given one."""
    settings: ClassVar[dict[str, Any]] = {"seed": None, "device": None, "dtype": None, "scheme": "uniform"}
    """The keywords that are the module's, not the layer's, with what they are if absent."""
    _chance: Mapping[str, Draw] = MappingProxyType({})
    """How its parameters were drawn that nobody has chosen."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Classes derived from these (torch's parametrized ones too) are not what a layer inside another becomes.
        if cls.layer_class is not None and "layer_class" in vars(cls):
            CLASSES[cls.layer_class] = cls
            # What help() and editors read.
            cls.__signature__ = _signature(cls.layer_class, cls.settings)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        place = {name: options.pop(name) for name in self.settings if name in options}
        known: dict[int, Module] = {}
        if self.layer_class is None:
            layer = _given_layer(*args, **options)
        else:
            layer = self.layer_class(
                *(_unwrapped(value, known) for value in args),
                **{name: _unwrapped(value, known) for name, value in options.items()},
            )
        self._hold(layer, known, **place)

    # -- its parts -----------------------------------------------------------------------------------------------------

    def _hold(
        self,
        layer: layers.Layer,
        known: Mapping[int, Module],
        *,
        seed: int | None = None,
        device: Any = None,
        dtype: Any = None,
        scheme: str | None = None,
        names: str = "scanfield",
    ) -> None:
        """Make the modules inside and all parameters; ``known`` are those that exist already, by their layer."""
        stated = seed is not None or scheme is not None
        seed, scheme = _seed(layer, seed), "uniform" if scheme is None else scheme
        values = _values(layer, seed, device, dtype, scheme)
        self._layer = layer.bare()
        self._paths = tuple((ours, upstream(layer, ours, names)) for ours in values)
        self._chance = {} if stated else draws(layer, seed, scheme)
        adopted: dict[str, Module] = {}
        for ours, inner in layer.named_layers():
            if any(ours == path or ours.startswith(path + ".") for path in adopted):
                continue
            path, there = upstream(layer, ours, names) if ours else "", known.get(id(inner))
            module = _find(self, path)
            if module is None:
                module = there or _empty(inner)
                owner, name = _place(self, path)
                owner.add_module(name, module)
            elif there is not None:
                # The inside of a Residual has no name of its own: what it has is the Residual's.
                module._modules.update(there._modules)
                module._parameters.update(there._parameters)
            if there is not None:
                adopted[ours] = there
            elif isinstance(module, Module) and module is not self and not hasattr(module, "_paths"):
                module._layer = inner.bare()
                module._paths = tuple(
                    (name[len(ours) + 1 :], full[len(path) + 1 :])
                    for name, full in self._paths
                    if name.startswith(ours + ".")
                )
        for ours, path in self._paths:
            if any(not above or ours.startswith(above + ".") for above in adopted):
                continue
            owner, name = _place(self, path)
            if name not in owner._parameters:
                owner.register_parameter(name, torch.nn.Parameter(values[ours]))
        if adopted:
            self._inherit(adopted, values, draws(layer, seed, scheme), stated, device, dtype)

    def _inherit(
        self,
        adopted: Mapping[str, Module],
        values: Mapping[str, Tensor],
        drawn: Mapping[str, Draw],
        stated: bool,
        device: Any,
        dtype: Any,
    ) -> None:
        """Bring what was said of the whole to the modules that were given, by their places in the layer."""
        # What is on "meta" has no numbers to keep.
        anew = {name for name, tensor in self._tensors().items() if tensor.is_meta}
        chance = {
            name: draw
            for name, draw in self._chance.items()
            if not any(not above or name.startswith(above + ".") for above in adopted)
        }
        for ours, module in adopted.items():
            if stated:
                anew |= {joined(ours, name) for name in untouched(module._chance, module._tensors())}
            else:
                chance |= {joined(ours, name): draw for name, draw in module._chance.items()}
        self._chance = chance
        place: dict[str, Any] = {} if device is None else {"device": torch.device(device)}
        if dtype is not None and values:  # as the dtype itself, also where its name was given
            place["dtype"] = next(iter(values.values())).dtype
        for module in adopted.values():
            own = [*module.parameters()]
            if "device" in place and own and all(parameter.is_meta for parameter in own):
                module.to_empty(device=place["device"])
            module.to(**place)
        tensors = self._tensors()
        with torch.no_grad():
            for name in anew:
                fresh = values[name]
                if (
                    fresh.is_meta and not tensors[name].is_meta
                ):  # "meta" is the default device, not that of the module
                    fresh = next(numbers(drawn[name]))
                tensors[name].copy_(fresh)

    def reset_parameters(self, seed: int | None = None, scheme: str = "uniform") -> None:
        """Draw all parameters anew, in place: as in the constructor, and after ``to_empty`` of a module on "meta"."""
        tensors = self._tensors()
        drawn = _values(self._layer, _seed(self._layer, seed), "cpu", torch.float64, scheme)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(drawn[name])

    def _tensors(self) -> dict[str, Tensor]:
        """The parameters by the layer's names, as they stand in the modules now."""
        found = {}
        for ours, path in self._paths:
            holder: Any = self
            for part in path.split("."):
                holder = getattr(holder, part)
            found[ours] = holder
        return found

    @property
    def layer(self) -> layers.Layer:
        """The layer over this module's own tensors, for what autograd has no part in: relevance, ``Trace``, ``vjp``, files.

        What does not require a gradient is frozen in it. It is made at each reading; a ``set_parameter`` on it does not
        reach the module, changes in place do.

        >>> import torch
        >>> from scanfield_torch import nn
        >>> block, x = nn.MambaBlock(4, 2, seed=0), torch.ones(1, 5, 4)
        >>> found = block.layer.relevance(block(x).output.detach(), x)
        >>> bool(found.report.gap.abs().max() < 1e-5)
        True
        """
        tensors = self._tensors()
        made = self._layer.replaced({name: tensor.detach() for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            if not tensor.requires_grad:
                made.freeze(name)
        return made

    # -- running -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, state: Mapping[str, Tensor] | None = None, *, cu_seqlens: Any = None) -> Any:
        """What the layer returns for x: ``LayerResult(output, state)``, or the output alone of a layer that carries nothing.

        Parameters and errors as in the layer's call.
        """
        return self._run(x, state, read_bounds(cu_seqlens), single=False)

    def step(self, x: Tensor, state: Mapping[str, Tensor] | None = None) -> Any:
        """One token, as the layer's ``step``: x (batch, width), or (batch,) integers.

        >>> import torch
        >>> from scanfield_torch import nn
        >>> block = nn.Mamba2Block(4, 3, head_dim=2, seed=0)
        >>> x = torch.ones(1, 3, 4)
        >>> y, state = block(x[:, :2])
        >>> torch.allclose(block.step(x[:, 2], state).output, block(x).output[:, 2])
        True
        """
        check_token(x, self._layer.tokens)
        found = self._run(x.unsqueeze(1), state, None, single=True)
        if isinstance(found, layers.LayerResult):
            return layers.LayerResult(found.output.squeeze(1), found.state)
        return found.squeeze(1)

    def _run(self, x: Tensor, state: Any, bounds: Any, *, single: bool) -> Any:
        layer = self._layer
        run, value = layer.start(x, state, bounds, parameters=self._tensors())
        run.single = single
        result = layer.finish(run, layer.through(run, value), x)
        return result if layer.state_names() else result.output

    def extra_repr(self) -> str:
        """The shapes of its own parameters."""
        return ", ".join(
            f"{name} {tuple(tensor.shape)}" for name, tensor in self._parameters.items() if tensor is not None
        )


CLASSES: dict[type[layers.Layer], type[Module]] = {}
"""The class of modules for each class of layers."""


def _given_layer(*args: Any, **options: Any) -> layers.Layer:
    given = [*args, *options.values()]
    if len(given) != 1 or not set(options) <= {"layer"} or not isinstance(given[0], layers.Layer):
        raise ArgumentError(f"layer: {given!r}; nn.Module takes one layer of scanfield.layers")
    return given[0]


def _signature(layer_class: type[layers.Layer], settings: Mapping[str, Any]) -> inspect.Signature:
    """The layer's own arguments, then the module's."""
    own = [*inspect.signature(layer_class).parameters.values()]
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=absent)
        for name, absent in settings.items()
    ]
    last = [own.pop()] if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    return inspect.Signature([*own, *ours, *last])


def _unwrapped(value: Any, known: dict[int, Module]) -> Any:
    """Modules among the arguments as their layers."""
    if isinstance(value, Module):
        known[id(value._layer)] = value
        return value._layer
    if isinstance(value, list | tuple):
        return type(value)(_unwrapped(entry, known) for entry in value)
    return value


def _seed(layer: layers.Layer, seed: int | None) -> int:
    """The seed, or one of torch's own generator where something is to be drawn."""
    if seed is not None or all(name in owner._values for _, owner, name in layer.owners()):
        return 0 if seed is None else seed
    return int(torch.randint(2**31, (), device="cpu"))


def _values(layer: layers.Layer, seed: int, device: Any, dtype: Any, scheme: str) -> dict[str, Tensor]:
    """The first values of all parameters: copies of the arrays that there are, the others drawn."""
    owners = [*layer.owners()]
    held = {full: owner._values[name] for full, owner, name in owners if name in owner._values}
    own = next((dtype_name(array.dtype) for array in held.values()), None)
    kind = dtype or (torch.get_default_dtype() if own is None else getattr(torch, own))
    where = torch.get_default_device() if device is None else device
    given = {
        name: torch.tensor(host(array), device=where, dtype=dtype or getattr(torch, dtype_name(array.dtype)))
        for name, array in held.items()
    }
    if len(held) == len(owners):
        return given
    drawn = layer.bare().init(seed, torch, device=where, dtype=kind, scheme=scheme).named_parameters()
    return drawn | given


def _empty(layer: layers.Layer) -> Module:
    """A module for a layer inside another; its parent fills it."""
    kind = next((CLASSES[base] for base in type(layer).__mro__ if base in CLASSES), Module)
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    return made


def _find(root: torch.nn.Module, path: str) -> torch.nn.Module | None:
    module: torch.nn.Module | None = root
    for part in path.split(".") if path else ():
        module = None if module is None else module._modules.get(part)
    return module


def _place(root: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    """The module in which the last part of a path is a name, and that; modules on the way that are none of ours are made."""
    *above, name = path.split(".")
    module = root
    for depth, part in enumerate((*above, name)):
        # A property or method would be found in the place of what bears its name.
        if hasattr(type(module), part):
            raise ArgumentError(
                f"layer: a part of it is called {part!r} ({path}), which means something else in a {type(module).__name__}"
            )
        if depth < len(above):
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
    return module, name
