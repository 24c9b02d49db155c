"""LoRA adapters as clients send them: pairs of factors, their scale, other tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from fedrot.collect.statistics import Statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.gauges import Factors
from fedrot.tensors import TensorDict, Tensors, compute_dtype

T = TypeVar("T")

#: Names of the first factor: ``lora_A.weight``, ``lora_A.NAME.weight``,
#: ``lora_embedding_A``.
_FIRST = re.compile(
    r"(?P<start>(?P<module>.+)\.lora_(?P<kind>embedding_)?)A(?P<rest>(\..+)?)"
)
#: Parts of names in a model's state dict that PEFT's files do not have: those of
#: wrappers (DataParallel, torch.compile, FSDP), and the adapter's name.
_EXTRA = re.compile(
    r"^((module|_orig_mod)\.)+|\b_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\."
    r"|\bmodules_to_save\.[^.]+\."
    r"|(?<=\.lora_[AB])\.(?!weight$|bias$)[^.]+"
    r"|(?<=\.lora_embedding_[AB])\.[^.]+"
    r"|(?<=\.lora_magnitude_vector)\..+"
)
#: PEFT's prefix of the names of a model's modules.
_WRAPPER = "base_model.model."
_WHOLE = (
    "Give all tensors of an adapter, as get_peft_model_state_dict(model) returns them."
)
#: Fields of ``LoraConfig`` with which an update is not a single product ``B A``.
_NO_PRODUCT = {
    "target_parameters": "its factors hold several products each "
    "(experts of a mixture)",
    "kasa_config": "KaSA has a diagonal matrix between the factors",
    "use_bdlora": "the factors of BD-LoRA are block-diagonal",
    "monteclora_config": "MonteCLoRA learns noise in the coordinates of A",
}
#: Values of ``LoraConfig.init_lora_weights`` that do not change the base weights. The
#: others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract from the base weights a matrix
#: that depends on the rank.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Pair:
    """The names of the two factors of one module.

    Attributes:
        module: the module's name, with PEFT's prefix.
        a: of the factor ``[rank, in]``; of an embedding ``[rank, tokens]``.
        b: of the factor ``[out, rank]``.
        of_embedding: whether the module is an embedding. PEFT starts these pairs with
            ``A = 0`` and a random ``B``, all other pairs with ``B = 0`` and a random
            ``A``.
    """

    module: str
    a: str
    b: str
    of_embedding: bool = False

    @property
    def bias(self) -> str:
        """The name of the bias of ``B`` (``lora_bias=True``), scaled like ``B A``."""
        return f"{self.b.removesuffix('.weight')}.bias"


@dataclass(frozen=True)
class LoraSettings:
    """The fields of PEFT's ``LoraConfig`` that determine an adapter's scale.

    The update of a module is ``scale * B A``, with ``scale = alpha / rank``, or ``alpha
    / sqrt(rank)`` with ``use_rslora``. The rank is that of the tensors.

    Example: ``LoraSettings.of(peft_model.peft_config["default"])``.

    Attributes:
        alpha: of all modules that no pattern names.
        alpha_pattern: alpha by name of a module, or by a regular expression for the end
            of its name.
        use_rslora: see above.
        changed_base: the initialisation if it changed the base weights, such as
            ``pissa``; else empty.
    """

    alpha: float = 8.0
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    changed_base: str = ""

    def __post_init__(self) -> None:
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if not 0 < alpha < math.inf:
                raise FedrotError(f"alpha is {alpha}; it must be positive and finite.")

    @classmethod
    def of(cls, config: Any) -> LoraSettings:
        """Read a ``LoraConfig``, or a dictionary as in ``adapter_config.json``.

        Alpha is 8 by default.

        Raises:
            FedrotError: ``config`` is neither of them, is of another kind of adapter,
                or its alpha is not positive.
        """
        if isinstance(config, cls):
            return config
        fields = config.to_dict() if hasattr(config, "to_dict") else config
        known = {"lora_alpha", "peft_type", "r"}
        if not isinstance(fields, Mapping) or known.isdisjoint(fields):
            raise FedrotError(
                f"A {type(config).__name__} is no configuration of a LoRA adapter. "
                'Give the LoraConfig of the model, peft_model.peft_config["default"] '
                "or of its adapter's name, or the content of adapter_config.json."
            )
        peft_type = fields.get("peft_type") or "LORA"
        kind = str(getattr(peft_type, "value", peft_type))
        if kind != "LORA":
            raise FedrotError(
                f"The adapter is of kind {kind}; only LORA adapters can be averaged."
            )
        for name, what in _NO_PRODUCT.items():
            if fields.get(name):
                raise FedrotError(
                    f"The adapter has {name}: {what}, which fedrot does not average. "
                    "Take a LoraConfig with target_modules and without this field."
                )
        start = fields.get("init_lora_weights")
        if start == "mica":
            raise FedrotError(
                "The adapter has init_lora_weights='mica': clients train A from 0 "
                "while B is frozen. fedrot has no method for this. Take another "
                "initialisation, or Flower's FedAvg."
            )
        alpha = fields.get("lora_alpha")
        alpha = cls.alpha if alpha is None else float(alpha)
        patterns = fields.get("alpha_pattern") or {}
        patterns = {str(key): float(value) for key, value in patterns.items()}
        changed = "" if start in _STARTS else str(start)
        return cls(alpha, patterns, bool(fields.get("use_rslora")), changed)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of ``B A`` in a module of this name and rank."""
        alpha = by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True)
class AdapterUpdate:
    """A client's adapter.

    Attributes:
        tensors: as ``get_peft_model_state_dict`` returns them.
        weight: positive, such as the number of examples.
        settings: of the client's adapter.
        statistics: those that the method ``needs``, and ``trained``, the rows of task
            heads that the client trained, see ``Mean``. Others are not used.
    """

    tensors: Tensors
    weight: float
    settings: LoraSettings
    statistics: Statistics = field(default_factory=dict)


def by_pattern(pattern: Mapping[str, T], module: str, default: T) -> T:
    """Return a module's value in ``LoraConfig.alpha_pattern`` or ``rank_pattern``."""
    name = module.removeprefix(_WRAPPER)
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return default


def plain_name(name: str) -> str:
    """Return the name of an adapter's tensor as PEFT's files have it.

    Example: ``plain_name("module.x.lora_A.default.weight")`` is ``x.lora_A.weight``.
    """
    return _EXTRA.sub("", name)


def plain_names(tensors: Tensors) -> Tensors:
    """Return an adapter under the names of PEFT's files; several stay as they are."""
    renamed = {plain_name(name): tensor for name, tensor in tensors.items()}
    return renamed if len(renamed) == len(tensors) else tensors


def pairs_of(tensors: Mapping[str, Any]) -> tuple[Pair, ...]:
    """Return the pairs of factors among the tensors of an adapter, in their order.

    Raises:
        UpdateError: a factor has no partner, or there are no factors.
    """
    pairs: list[Pair] = []
    for name in tensors:
        match = _FIRST.fullmatch(name)
        if match is None:
            continue
        module = match["module"]
        if module.endswith(".base_layer"):
            raise UpdateError(
                f"The factor '{name}' belongs to parameters inside a module "
                "(target_parameters), which fedrot does not average. Adapt whole "
                "modules, target_modules=[...]."
            )
        if any(pair.module == module for pair in pairs):
            raise UpdateError(
                f"'{module}' has two pairs of factors. Give the tensors of "
                "one adapter: adapter_tensors(model, name)."
            )
        other = f"{match['start']}B{match['rest']}"
        if other not in tensors:
            raise UpdateError(f"The factor '{name}' has no partner '{other}'. {_WHOLE}")
        pairs.append(Pair(module, name, other, bool(match["kind"])))
    seconds = {pair.b for pair in pairs}
    for name in tensors:
        is_second = re.search(r"\.lora_(embedding_)?B(\.|$)", name)
        # LoraConfig(lora_bias=True) gives B a bias.
        if is_second and name not in seconds and not name.endswith(".bias"):
            raise UpdateError(f"The factor '{name}' has no partner. {_WHOLE}")
    if not pairs:
        raise UpdateError(
            "There are no factors of a LoRA adapter among the tensors (names with "
            f"lora_A and lora_B). {_WHOLE}"
        )
    return tuple(pairs)


def check_rank(rank: int) -> None:
    """Raise ``FedrotError`` unless the rank is a positive integer."""
    if not isinstance(rank, int) or rank < 1:
        raise FedrotError(f"rank is {rank!r}; it must be an integer of at least 1.")


def factors(tensors: Tensors, pair: Pair) -> Factors:
    """Return the factors of a pair as matrices ``A [rank, in]`` and ``B [out, rank]``.

    Kernels of convolutions are flattened.

    Raises:
        UpdateError: the ranks of the two differ (grouped convolutions), or the rank is
            0.
    """
    a = tensors[pair.a]
    b = tensors[pair.b]
    for name in (pair.a, pair.b):
        factor = tensors[name]
        if factor.ndim < 2 or not factor.numel():
            raise UpdateError(
                f"The factors '{pair.a}' and '{pair.b}' have no common rank: '{name}' "
                f"has shape {list(factor.shape)}, like weights of sharded training "
                "(ZeRO-3, FSDP) that are not gathered. Gather the weights before you "
                "read the adapter."
            )
    if len(a) != b.shape[1]:
        raise UpdateError(
            f"The factors '{pair.a}' {list(a.shape)} and '{pair.b}' {list(b.shape)} "
            "have no common rank. Adapters of grouped convolutions are not supported."
        )
    return a.detach().flatten(1), b.detach().flatten(1)


def wide_factors(tensors: Tensors, pair: Pair) -> Factors:
    """Return ``factors`` in the dtype for computations, with its errors."""
    a, b = factors(tensors, pair)
    wide = torch.promote_types(compute_dtype(a), compute_dtype(b))
    return a.to(wide), b.to(wide)


def rescale(tensors: TensorDict, name: str, scale: float) -> None:
    """Replace a tensor, if there is one of this name, by ``scale`` times it."""
    if name in tensors and scale != 1:
        tensors[name] = tensors[name] * scale


def named(matrices: Factors, pair: Pair, like: Tensors) -> TensorDict:
    """Return copies of matrices by name, in the shapes and dtypes of ``like``.

    This is the inverse of ``factors``, but the rank may differ from that of ``like``.
    """
    tensors: TensorDict = {}
    for name, matrix in zip((pair.a, pair.b), matrices, strict=True):
        tensor = like[name]
        rows, columns = matrix.shape
        inner = tensor.shape[1:]
        if columns != inner.numel():
            # The second axis is the rank.
            inner = torch.Size([columns, *tensor.shape[2:]])
        tensors[name] = matrix.reshape(rows, *inner).to(tensor, copy=True)
    return tensors
