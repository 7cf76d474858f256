"""Hugging Face transformers' recurrent models on scanfield's scans: ``accelerate(model)``.

The models call module-level functions; inside of an accelerated model these are the ones of ``compat.mamba_ssm``
and ``compat.fla``. Nothing of the model is copied or changed: hooks on it say when its layers run, and come off
again. transformers itself is not imported here: who has a model has imported it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, Self

from scanfield.arrays import copy
from scanfield.compat import _arrays, _hooked
from scanfield.errors import ArgumentError, BackendError, StateError


class _Kind(NamedTuple):
    """The module-level functions of a family of models, and whether its mixers drop the cached state of a prompt."""

    functions: Mapping[str, Callable[..., Any]]
    drops_state: bool = False


_CONVOLUTION = {"causal_conv1d_fn": _hooked.convolution}
_MAMBA = _Kind(
    {
        "mamba_selective_scan": _hooked.scan,  # one decoding step is right and cheap in transformers' own form
        "mamba_inner_fn": _hooked.nothing_fused,
        **_CONVOLUTION,
    },
    drops_state=True,
)
_ZAMBA = _MAMBA._replace(functions={n: f for n, f in _MAMBA.functions.items() if n != "mamba_inner_fn"})
_MAMBA2 = _Kind(
    {
        "mamba2_chunk_scan": _hooked.chunk_scan,
        "mamba2_selective_state_update": _hooked.update,
        "mamba2_split_conv1d_scan_combined": _hooked.nothing_fused,
        **_CONVOLUTION,
    }
)
_GATED_DELTA = _Kind(
    {
        "torch_chunk_gated_delta_rule": _hooked.gated_delta_rule,
        "torch_recurrent_gated_delta_rule": _hooked.gated_delta_rule,
        **_CONVOLUTION,
    }
)
_KIMI = _Kind(
    {
        "chunk_kimi_delta_attention": _hooked.kimi_delta_attention,
        "recurrent_kimi_delta_attention": _hooked.kimi_delta_attention,
        **_CONVOLUTION,
    }
)
# model -> (class of its recurrent layers, their functions)
_MODELS: Mapping[str, tuple[str, _Kind]] = {
    "bailing_hybrid": ("BailingHybridDeltaAttention", _KIMI),
    "bamba": ("BambaMixer", _MAMBA2),
    "falcon_h1": ("FalconH1Mixer", _MAMBA2),
    "falcon_mamba": ("FalconMambaMixer", _MAMBA),
    "glm5_next": ("Glm5NextTextLinearAttention", _KIMI),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", _MAMBA2),
    "jamba": ("JambaMambaMixer", _MAMBA),
    "kimi_linear": ("KimiLinearDeltaAttention", _KIMI),
    "lara_mini": ("LaraMiniGatedDeltaNet", _GATED_DELTA),
    "mamba": ("MambaMixer", _MAMBA),
    "mamba2": ("Mamba2Mixer", _MAMBA2),
    "nemotron_h": ("NemotronHMamba2Mixer", _MAMBA2),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", _GATED_DELTA),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", _GATED_DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", _GATED_DELTA),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", _GATED_DELTA),
    "qwen4_exp": ("Qwen4ExpTextGatedDeltaNet", _GATED_DELTA),
    "zamba": ("ZambaMambaMixer", _ZAMBA),
    "zamba2": ("Zamba2MambaMixer", _MAMBA2),
}
_PREFIX = "transformers.models."
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
    return tuple(_MODELS)


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
    Tested with transformers 5.24. The cache keeps its own buffers, which are updated in place as upstream does.
    Other models, and other instances of the same model, keep transformers' functions.

    Examples
    --------
    ::

        from scanfield.compat.transformers import accelerate

        with accelerate(model):
            model.generate(input_ids, max_new_tokens=64)
    """
    if not callable(getattr(model, "modules", None)) or not hasattr(model, "register_forward_pre_hook"):
        raise ArgumentError(
            f"model: expected a torch module, came {type(model).__module__}.{type(model).__qualname__}"
        )
    layers = [(layer, found) for layer in model.modules() if (found := _kind_of(layer)) is not None]
    if not layers:
        raise BackendError(
            f"model: {type(model).__name__} has no layer that scanfield can run; supported are {', '.join(_MODELS)}"
        )
    modules = {name: _MODELS[name][1] for _, name in layers}
    for name, kind in modules.items():
        _check_functions(_module(name), kind)
    return Acceleration(model, layers, modules)


_kinds: dict[type, str | None] = {}  # asked at each layer of each token


def _kind_of(layer: Any) -> str | None:
    """The model type of a recurrent layer, seen by its class or one that it inherits from."""
    cls = type(layer)
    if cls not in _kinds:
        _kinds[cls] = next(filter(None, map(_kind_by_name, cls.__mro__)), None)
    return _kinds[cls]


def _kind_by_name(cls: type) -> str | None:
    name = cls.__module__.removeprefix(_PREFIX).partition(".")[0]
    known = cls.__module__.startswith(_PREFIX) and name in _MODELS and cls.__name__ == _MODELS[name][0]
    return name if known else None


def _module(name: str) -> ModuleType:
    return sys.modules[f"{_PREFIX}{name}.modeling_{name}"]


def _check_functions(module: ModuleType, kind: _Kind) -> None:
    missing = [name for name in kind.functions if not hasattr(module, name)]
    if missing:
        version = getattr(sys.modules.get("transformers"), "__version__", "of this process")
        raise BackendError(
            f"model: {module.__name__} of transformers {version} has no {', '.join(missing)}; tested is version 5.24"
        )


class Acceleration:
    """What ``accelerate`` has put in place for one model."""

    def __init__(self, model: Any, layers: list[tuple[Any, str]], modules: Mapping[str, _Kind]) -> None:
        self.layers = len(layers)
        """How many layers run on scanfield."""
        self.models = tuple(modules)
        """The model types that they belong to."""
        self._modules: dict[str, _Kind] = dict(modules)
        self._handles = []
        for name, kind in modules.items():
            _put(name, kind)
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
        for name, kind in self._modules.items():
            _take_back(name, kind)
        self._modules.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


# ---------------------------------------------------------------------------------------------------------------------
# the functions of transformers' modules: put in place for the first model of a type, back with the last

_originals: dict[str, dict[str, Any]] = {}
_users: dict[str, int] = {}


def _put(name: str, kind: _Kind) -> None:
    with _LOCK:
        _users[name] = _users.get(name, 0) + 1
        if _users[name] > 1:
            return
        module = _module(name)
        _originals[name] = {function: getattr(module, function) for function in kind.functions}
        for function, ours in kind.functions.items():
            setattr(module, function, _hooked.within_frames(_originals[name][function], ours))


def _take_back(name: str, kind: _Kind) -> None:
    with _LOCK:
        _users[name] -= 1
        if _users[name] == 0:
            for function, original in _originals.pop(name).items():
                setattr(_module(name), function, original)


# ---------------------------------------------------------------------------------------------------------------------
# hooks: functions of a module that is given, so that copies of the model have them too


class _Ambient(threading.local):
    """The packs of the models that are running in this thread, for layers that are not told of them."""

    def __init__(self) -> None:
        self.packs: list[Any] = []


_ambient = _Ambient()


def _note_sequences(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    _ambient.packs.append((kwargs.get("seq_idx"), kwargs.get("cu_seq_lens_q"), model))


def _forget_sequences(model: Any, args: Any, output: Any) -> None:
    if _ambient.packs:
        _ambient.packs.pop()


def _open_frame(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    _hooked.enter(_hooked.Frame())  # whatever raises from here on, the closing hook finds one
    hidden = args[0] if args else kwargs["hidden_states"]
    batch, time = hidden.shape[:2]
    if time == 1:
        return
    frame = _hooked.Frame(seq_idx=_sequences(layer, kwargs, hidden, batch, time))
    name = _kind_of(layer)
    if name is not None and _MODELS[name][1].drops_state:
        states = next((kwargs[word] for word in _CACHES if kwargs.get(word) is not None), None)
        state = None if states is None else states.get_recurrent_state(layer.layer_idx, state_idx=0)
        frame.state = (
            None if state is None else copy(state)
        )  # the cache writes into its buffer in the same pass
    _hooked.leave()
    _hooked.enter(frame)


def _close_frame(layer: Any, args: Any, output: Any) -> None:
    _hooked.leave()


def _sequences(layer: Any, kwargs: Mapping[str, Any], hidden: Any, batch: int, time: int) -> Any:
    """The sequence of each token, from the layer's own keywords or else those of the model."""
    seq_idx, bounds = kwargs.get("seq_idx"), kwargs.get("cu_seq_lens_q")
    if seq_idx is None and bounds is None and _ambient.packs:
        seq_idx, bounds, model = next(
            (pack for pack in reversed(_ambient.packs) if pack[0] is not None or pack[1] is not None),
            _ambient.packs[-1],
        )
        packed = seq_idx is not None or bounds is not None
        if packed and layer.training and _checkpoints(model):
            raise StateError(
                f"seq_idx, cu_seq_lens_q: {type(layer).__name__} is not told of them by transformers, so gradient "
                "checkpointing would recompute it without; switch the checkpointing off"
            )
    if bounds is not None:
        xp = _arrays.namespace(hidden_states=hidden)
        host = _arrays.checked_bounds(bounds, batch, time)
        numbers = [row for row, length in enumerate(_arrays.lengths(host)) for _ in range(length)]
        return xp.asarray([numbers], dtype=xp.int32)
    return seq_idx


def _checkpoints(model: Any) -> bool:
    """Whether the model recomputes its layers in backward; the name of that has changed."""
    for word in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(type(model), word):
            return bool(getattr(model, word))
    return False
