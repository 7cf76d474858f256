"""Hugging Face transformers' recurrent models on scanfield's scans: ``accelerate(model)``.

The models call module-level functions; inside of an accelerated model these are the ones of ``compat.mamba_ssm``
and ``compat.fla``. Nothing of the model is copied or changed: hooks on it say when its layers run, and come off
again. transformers itself is not imported here: who has a model has imported it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from scanfield.advice import class_of
from scanfield.arrays import copy
from scanfield.compat import _arrays, _hooked, _older
from scanfield.compat._models import MODELS, Mixer, kind_of, mixer_of, module_of
from scanfield.compat._open import Open, calling
from scanfield.errors import ArgumentError, BackendError, StateError

_CACHES = ("cache", "past_key_values", "cache_params")  # today's name first, then those of older versions
_LOCK = threading.RLock()


def supported() -> tuple[str, ...]:
    """The model types that ``accelerate`` takes.

    Examples
    --------
    >>> from scanfield.compat import transformers
    >>> "mamba2" in transformers.supported()
    True
    """
    return tuple(MODELS)


def accelerate(model: Any) -> Acceleration:
    """Run the recurrent layers of a transformers model on scanfield, until ``undo()`` or the end of a ``with`` block.

    Beside speed on a CPU it mends what upstream gets wrong: a prompt that comes in pieces continues its state
    (Mamba, FalconMamba, Jamba and Zamba restart it), and packed sequences, told by the keyword ``seq_idx`` (batch,
    time) or ``cu_seq_lens_q`` (sequences + 1,) of the model's forward, are kept apart by every layer.

    Parameters
    ----------
    model : torch.nn.Module
        A model of one of the types of ``supported()``, or one that contains such layers.

    Returns
    -------
    Acceleration
        A context manager with ``undo()``, ``layers`` and ``models``; what it does is in force already.

    Raises
    ------
    ArgumentError
        For what is no torch module.
    BackendError
        For a model without such layers, and a transformers version whose functions have other names.
    StateError
        In forward: for packed sequences under gradient checkpointing where the layers are not told of them.

    Notes
    -----
    Tested with transformers 5.24 and 5.9. Of 5.9, which has fewer types, falcon_h1, nemotron_h and zamba2 are refused, and
    packed sequences of olmo_hybrid. The cache keeps its own buffers, which are updated in place as upstream does.
    Other models, and other instances of the same model, keep transformers' functions. A copy or pickle of an accelerated
    model runs on scanfield while some model of its type is accelerated; accelerate it too. Accelerate before
    ``torch.compile``: what is compiled already does not see new hooks.

    Examples
    --------
    ::

        from scanfield.compat.transformers import accelerate

        with accelerate(model):
            model.generate(input_ids, max_new_tokens=64)
    """
    if not callable(getattr(model, "modules", None)) or not hasattr(model, "register_forward_pre_hook"):
        raise ArgumentError(f"model: expected a torch module, came {class_of(model)}")
    if isinstance(model, type):
        raise ArgumentError(
            f"model: {model.__name__} is a class; pass an instance: {model.__name__}(config), or from_pretrained(...)"
        )
    layers = [(layer, found) for layer in model.modules() if (found := mixer_of(layer)) is not None]
    if not layers:
        raise BackendError(
            f"model: {type(model).__name__} has no layer that scanfield can run; supported are {', '.join(MODELS)}"
        )
    mixers = {found.name: found for _, found in layers}
    for layer, found in layers:
        kind_of(found.name, found.cls, layer)  # another version's functions would have other names
    return Acceleration(model, layers, mixers)


class Acceleration:
    """What ``accelerate`` has put in place for one model."""

    def __init__(self, model: Any, layers: list[tuple[Any, Mixer]], mixers: Mapping[str, Mixer]) -> None:
        self.layers = len(layers)
        """How many layers run on scanfield."""
        self.models = tuple(mixers)
        """The model types that they belong to."""
        self._mixers: dict[str, Mixer] = dict(mixers)
        self._own = [layer for layer, found in layers if found.kind.attributes]
        self._handles = []
        for mixer in mixers.values():
            _put(mixer)
        for layer in self._own:
            _put_attributes(layer)
        for outer in {id(x): x for x in (model, getattr(model, "base_model", model))}.values():
            self._handles += [
                outer.register_forward_pre_hook(_note_sequences, with_kwargs=True),
                outer.register_forward_hook(_forget_sequences, always_call=True),
            ]
        for layer, _ in layers:
            self._handles += [
                layer.register_forward_pre_hook(_open_frame, with_kwargs=True),
                layer.register_forward_hook(_close_frame, always_call=True),
            ]

    def undo(self) -> None:
        """Take the hooks off; transformers' own functions are back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for mixer in self._mixers.values():
            _take_back(mixer)
        for layer in self._own:
            _take_back_attributes(layer)
        self._mixers.clear()
        self._own.clear()

    def __repr__(self) -> str:
        state = "" if self._handles else ", undone"
        return f"Acceleration({self.layers} layers of {', '.join(self.models)}{state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


# ---------------------------------------------------------------------------------------------------------------------
# the functions of transformers' modules: put in place for the first model of a type, back with the last

_ABSENT = object()
_originals: dict[str, dict[str, Any]] = {}
_ours: dict[str, dict[str, Any]] = {}
_users: dict[str, int] = {}


def _put(mixer: Mixer) -> None:
    name, cls, kind = mixer
    with _LOCK:
        _users[name] = _users.get(name, 0) + 1
        if _users[name] > 1:
            return
        module = module_of(name)
        _originals[name] = {function: getattr(module, function, _ABSENT) for function in kind.functions}
        _ours[name] = {
            function: _hooked.within_frames(_originals[name][function], ours)
            for function, ours in kind.functions.items()
        }
        _ensure(name)
        if kind.plain:
            _originals[name][kind.plain] = getattr(cls, kind.plain)
            setattr(cls, kind.plain, _older.prompt(getattr(cls, kind.plain), partial(_ensure, name)))


def _ensure(name: str) -> None:
    """Our functions in a module, also where one of its constructors has assigned others."""
    module = module_of(name)
    for function, ours in _ours[name].items():
        if getattr(module, function, _ABSENT) is not ours:
            setattr(module, function, ours)


def _take_back(mixer: Mixer) -> None:
    name, cls, kind = mixer
    with _LOCK:
        _users[name] -= 1
        if _users[name]:
            return
        del _ours[name]
        for function, original in _originals.pop(name).items():
            place = cls if function == kind.plain else module_of(name)
            if original is _ABSENT:
                delattr(place, function)
            else:
                setattr(place, function, original)


_NAME = "_scanfield_originals"


def _put_attributes(layer: Any) -> None:
    """An older layer's own functions, which it keeps beside ours, with the number of their users."""
    attributes = mixer_of(layer).kind.attributes  # type: ignore[union-attr]
    with _LOCK:
        users, originals = layer.__dict__.get(_NAME, (0, {}))
        if not users:
            originals = {name: getattr(layer, name) for name in attributes}
            for name, ours in attributes.items():
                setattr(layer, name, _hooked.Chosen(originals[name], ours))
        layer.__dict__[_NAME] = (users + 1, originals)


def _take_back_attributes(layer: Any) -> None:
    with _LOCK:
        users, originals = layer.__dict__[_NAME]
        if users > 1:
            layer.__dict__[_NAME] = (users - 1, originals)
            return
        del layer.__dict__[_NAME]
        for name, original in originals.items():
            setattr(layer, name, original)


# ---------------------------------------------------------------------------------------------------------------------
# hooks: functions of a module that is given, so that copies of the model have them too; they act while its type has
# an acceleration in force


_packs = Open()
"""The packs of the models that are running, for layers that are not told of them.

Each as seq_idx, cu_seq_lens_q, whether the model would recompute its layers in backward, and the ids of the modules in it:
another model that runs inside of its forward has sequences of its own. The model itself is not kept, and no ids while
torch.compile traces, which cannot look at either; None is any layer.
"""


def _note_sequences(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    seq_idx, bounds = kwargs.get("seq_idx"), kwargs.get("cu_seq_lens_q")
    packed, call = seq_idx is not None or bounds is not None, calling()
    members = None if call is None else frozenset(map(id, model.modules()) if packed else ())
    _packs.enter((seq_idx, bounds, packed and model.training and _checkpoints(model), members), call)


def _forget_sequences(model: Any, args: Any, output: Any) -> None:
    _packs.leave()


def _open_frame(layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    outer, call = _hooked.frames.innermost(), calling()
    if (
        outer is not None and outer.layer is layer
    ):  # a second acceleration; the first one has read the keywords
        _hooked.frames.enter(outer, call)
        return None
    _hooked.frames.enter(_hooked.Frame(), call)  # whatever raises from here on, the closing hook finds one
    if not _in_force(layer):
        return None
    hidden = args[0] if args else kwargs["hidden_states"]
    batch, time = hidden.shape[:2]
    if time == 1:
        return None
    frame = _hooked.Frame(seq_idx=_sequences(layer, kwargs, hidden, batch, time), layer=layer)
    mixer = mixer_of(layer)
    kind = None if mixer is None else mixer.kind
    cache = next((kwargs[word] for word in _CACHES if kwargs.get(word) is not None), None)
    if kind is not None and kind.drops_state and cache is not None:
        state = cache.get_recurrent_state(layer.layer_idx, state_idx=0)
        # The cache writes into its buffer in the same pass.
        frame.state = None if state is None else copy(state)
    elif kind is not None and kind.plain and cache is not None:
        frame.state, frame.inputs = _older.kept(layer, cache)
    _hooked.frames.leave()
    _hooked.frames.enter(frame, call)
    if frame.seq_idx is None or kind is None or not (kind.plain or kind.attributes):
        return None
    if not kind.packs:
        raise BackendError(
            f"seq_idx, cu_seq_lens_q: the convolutions of {type(layer).__name__} in this version of transformers are "
            "layers of their own, which do not know them; a newer one keeps them apart"
        )
    # Older layers refuse what only kernels know; the frame knows it.
    return args, {word: value for word, value in kwargs.items() if word not in ("seq_idx", "cu_seq_lens_q")}


def _in_force(layer: Any) -> bool:
    """Whether our functions are in place for a layer: a copy of an accelerated model may outlive its acceleration."""
    mixer = mixer_of(layer)
    return _NAME in layer.__dict__ or (mixer is not None and _users.get(mixer.name, 0) > 0)


def _close_frame(layer: Any, args: Any, output: Any) -> None:
    _hooked.frames.leave()


def _sequences(layer: Any, kwargs: Mapping[str, Any], hidden: Any, batch: int, time: int) -> Any:
    """The sequence of each token, from the layer's own keywords or else those of the model."""
    seq_idx, bounds = kwargs.get("seq_idx"), kwargs.get("cu_seq_lens_q")
    packs = _packs.running() if seq_idx is None and bounds is None else []
    # The innermost that has some and this layer in it: a base model may be told less than the model around it.
    for numbers, starts, recomputes, members in reversed(packs):
        if (numbers is None and starts is None) or not (members is None or id(layer) in members):
            continue
        seq_idx, bounds = numbers, starts
        if recomputes and layer.training:
            raise StateError(
                f"seq_idx, cu_seq_lens_q: {type(layer).__name__} is not told of them by transformers, so gradient "
                "checkpointing would recompute it without; switch the checkpointing off"
            )
        break
    if bounds is not None:
        xp = _arrays.namespace(hidden_states=hidden)
        host = _arrays.checked_bounds(bounds, batch, time)
        numbers = [row for row, length in enumerate(_arrays.lengths(host)) for _ in range(length)]
        return xp.asarray([numbers], dtype=xp.int32)
    return seq_idx


def _checkpoints(model: Any) -> bool:
    """Whether the model, or one that it wraps, recomputes layers in backward."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
