"""The last layer of a classifier, fitted at the server in closed form from sums that clients send.

The layer is a linear discriminant analysis of its own inputs, over the rows of all clients. Sources:
Luo et al., "No Fear of Heterogeneity" (CCVR, NeurIPS 2021), who fit a task head to class means and
covariances of clients; Legate et al. (FedNCM, NeurIPS 2023) and Fanì et al. (Fed3R, ICML 2024), who also
compute task heads from sums over clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrot.collect.hooks import watched
from fedrot.collect.labelled import labelled_logits
from fedrot.collect.statistics import GRAMS, kind_named
from fedrot.errors import FedrotError, UpdateError
from fedrot.symmetry.resolve import TensorsOrShapes, settings_of
from fedrot.tensors import Tensors, compute_dtype, unusable

#: Names of the last linear layer in classifiers of transformers, without a prefix.
HEADS = ("classifier", "score", "classifier.out_proj", "classification_head.out_proj")

#: Accepted rounding error of float64 sums, relative to their size.
_ROUNDING = 1e-12

#: Accepted excess of features over ``largest_inputs``: clients may compute in bfloat16.
_SLACK = 0.02

#: What precedes the task head, by ``model_type``, and the end of its name: a layer whose output goes
#: through tanh, or a norm.
_TANH = {
    **dict.fromkeys(("bert", "albert"), ("pooler.dense", "pooler")),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), ("classifier.dense",)),
    **dict.fromkeys(("bart", "t5"), ("classification_head.dense",)),
}
_NORMS = {
    **{"vit": "vit.layernorm", "gpt2": "transformer.ln_f"},
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3"), "model.norm"),
}


@dataclass(frozen=True, eq=False)
class ClassSums:
    """Sums over labelled rows of the inputs ``h`` of a task head; sums of clients add up (``+``).

    Attributes:
        counts: rows of each class, float64 ``[classes]``.
        sums: sum of ``h`` over the rows of each class, float64 ``[classes, inputs]``.
        gram: sum of ``h h^T`` over all rows, float64 ``[inputs, inputs]``.

    Raises:
        UpdateError: another dtype or shape, not finite, no rows, negative counts, a ``gram`` that is not
            symmetric, or sums that contradict each other.

    Example: ``total = sum(received[1:], received[0])``
    """

    counts: Tensor
    sums: Tensor
    gram: Tensor

    def __post_init__(self) -> None:
        classes, size = self.sums.shape if self.sums.ndim == 2 else (0, 0)
        shapes = {"counts": (classes,), "sums": (classes, size), "gram": (size, size)}
        for name, shape in shapes.items():
            value: Tensor = getattr(self, name)
            why = unusable(value)
            if not why and (value.dtype != torch.float64 or tuple(value.shape) != shape):
                why = f"are {value.dtype} of shape {list(value.shape)}, not float64 {list(shape)}"
            if not why and not bool(torch.isfinite(value).all()):
                why = "hold NaN or Inf. Check the client's training (learning rate, mixed precision)"
            if why:
                raise UpdateError(f"Of the sums of features by class, the '{name}' {why}.")
        if bool((self.counts < 0).any()) or not float(self.counts.sum()) > 0:
            raise UpdateError("The counts of rows by class are negative, or all 0.")
        limit = _ROUNDING * self.counts.sum() * self.gram.diagonal().abs()
        if bool((self.sums[self.counts == 0].square() > limit).any()):
            raise UpdateError("A class without rows has a sum of features that is not 0.")
        # The second moments inside the classes are a Gram matrix. Constant units leave rounding errors.
        slack = torch.diag(_ROUNDING * self.gram.diagonal() / self.counts.sum())
        problem = kind_named(GRAMS[1]).check(self._within() + slack, (classes, size))
        if problem:
            raise UpdateError(
                f"The second moments of the features inside the classes {problem}. The sums "
                "contradict each other; send what collect_classes returns."
            )

    def __add__(self, other: ClassSums) -> ClassSums:
        """Return the sums over the rows of both; raises ``UpdateError`` if shapes differ."""
        if self.sums.shape != other.sums.shape:
            raise UpdateError(
                f"Sums of features have shapes {list(self.sums.shape)} and {list(other.sums.shape)}; "
                "collect them at the same layer of the same model."
            )
        return ClassSums(self.counts + other.counts, self.sums + other.sums, self.gram + other.gram)

    def __mul__(self, factor: float) -> ClassSums:
        """Return the sums as if every row counted ``factor`` times."""
        return ClassSums(self.counts * factor, self.sums * factor, self.gram * factor)

    def check_within(self, largest: Tensor) -> None:
        """Raise ``UpdateError`` if features are larger than they can be, see ``largest_inputs``."""
        most = largest * (1 + _SLACK)
        rows = self.counts.sum()
        if bool((self.means().abs() > most).any()) or bool(
            (self.gram.diagonal() > rows * most**2).any()
        ):
            raise UpdateError(
                "The sums of features are larger than the model's features can be. Send what "
                "collect_classes returns."
            )

    def means(self) -> Tensor:
        """Return the classes' means; 0 for classes without rows."""
        return self.sums / torch.where(self.counts > 0, self.counts, 1.0).unsqueeze(1)

    def _within(self) -> Tensor:
        """Return the covariance inside the classes, float64 ``[inputs, inputs]``."""
        means = self.means()
        return (self.gram - means.mT @ (means * self.counts.unsqueeze(1))) / self.counts.sum()


def head_of(config: object, tensors: TensorsOrShapes) -> str:
    """Return the name of the last linear layer of a classifier, such as ``classifier.out_proj``.

    Args:
        config: a transformers configuration, or its dictionary.
        tensors: the model's state dict, or the shapes in it.

    Example: ``head_of(model.config, model.state_dict())``

    Raises:
        FedrotError: the model has no such layer or more than one (pass the layer's name yourself); or it
            does not predict one class per row: a language model, a regression, several labels.
        SymmetryError: ``config`` is not a configuration.
    """
    settings = settings_of(config)
    problem = settings.get("problem_type")
    if problem not in (None, "single_label_classification"):
        raise FedrotError(f"The config's problem_type is '{problem}': a row does not have one class.")
    # transformers does not write the labels of two classes into config.json.
    labels = settings.get("num_labels") or len(settings.get("id2label") or (0, 1))
    found = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if f".{name}".endswith(tuple(f".{head}.weight" for head in HEADS))
        and tuple(getattr(tensor, "shape", tensor))[:1] == (labels,)
    ]
    if len(found) == 1 and labels > 1:
        return found[0]
    which = f"more than one: {', '.join(found)}" if len(found) > 1 else "none"
    raise FedrotError(
        f"The task head of {labels} classes needs one of the names {', '.join(HEADS)}; the model has "
        f"{which}. Use a model that classifies sequences, tokens or images, with num_labels of at least "
        "2, or give the name of its last linear layer yourself."
    )


def largest_inputs(config: object, tensors: Tensors, head: str) -> Tensor | None:
    """Return the largest absolute value that each input of a task head can have, float64 ``[inputs]``.

    1 after tanh; ``|g| sqrt(d) + |b|`` after a norm of ``d`` units with gain ``g`` and bias ``b``. None
    for other models, and if other layers stand before the head.

    Args:
        config: a transformers configuration, or its dictionary.
        tensors: the model's state dict, in its order.
        head: the layer's name, from ``head_of``.

    Example: ``largest_inputs(model.config, model.state_dict(), "classifier")``
    """
    names, kind = list(tensors), str(settings_of(config).get("model_type"))
    before = names[names.index(f"{head}.weight") - 1].rpartition(".")[0]
    size = tensors[f"{head}.weight"].shape[1]
    if before.endswith(_TANH.get(kind, ())):
        return torch.ones(size, dtype=torch.float64)
    if before != _NORMS.get(kind):
        return None
    bias = tensors.get(f"{before}.bias", torch.zeros(()))
    return tensors[f"{before}.weight"].double().abs() * size**0.5 + bias.double().abs()


def collect_classes(model: nn.Module, batches: Iterable[Tensors], head: str) -> ClassSums:
    """Return the sums over a client's rows from which the server fits the task head.

    The features are the inputs of the task head at the positions of the logits: the last token of each
    row for decoders, every labelled token for token classifiers. The client sends only sums, so that
    secure aggregation works. Sums are float64, on the CPU; features are multiplied in float64.

    Args:
        model: a ``transformers`` classifier, usually the merged one, so that all clients compute the
            same features; it is run in evaluation mode, without gradients, and is not changed.
        batches: keyword arguments of the model's forward, with ``labels`` ``[rows]`` or
            ``[rows, tokens]``; rows with a negative label are left out.
        head: the name of the model's last linear layer, from ``head_of``.

    Example: ``sums = collect_classes(model, loader, head_of(model.config, model.state_dict()))``

    Raises:
        FedrotError: there is no such layer, its outputs are not the model's logits, or the batches have
            no labels for it.
        UpdateError: the features are not finite.
    """
    found: list[Tensor] = []

    def add(features: Tensor, labels: Tensor, classes: int) -> None:
        one_hot = nn.functional.one_hot(labels, classes).to(features)
        terms = (one_hot.sum(0), one_hot.mT @ features, features.mT @ features)
        sums = found or [torch.zeros(term.shape, dtype=torch.float64) for term in terms]
        found[:] = [total + term.cpu() for total, term in zip(sums, terms, strict=True)]

    read_inputs(model, batches, head, add)
    return ClassSums(*found)


def read_inputs(
    model: nn.Module, batches: Iterable[Tensors], head: str, seen: Callable[[Tensor, Tensor, int], None]
) -> None:
    """Call ``seen(inputs, labels, classes)`` for every batch of labelled rows that a classifier reads.

    The inputs of the task head are float64 ``[rows, inputs]`` on the model's device, the labels int64
    ``[rows]``. Arguments, rows and errors are those of ``collect_classes``.
    """
    layer = dict(model.named_modules()).get(head)
    if not isinstance(layer, nn.Linear):
        raise FedrotError(f"The model has no linear layer '{head}'; see fedrot.head.head_of.")
    classes, size = layer.weight.shape
    expected = getattr(getattr(model, "config", None), "num_labels", classes)
    read: list[Tensor] = []

    def watch(name: str, given: Tensor, output: Tensor) -> Tensor:
        """Keep the inputs and return their indices as outputs: the logits then show which are used."""
        if classes != expected:
            raise _not_last(head)
        read.append(given.reshape(-1, size))
        places = torch.arange(len(read[-1]), dtype=compute_dtype(output), device=given.device)
        return places.reshape(*given.shape[:-1], 1).repeat(*[1] * (given.ndim - 1), classes)

    with watched(model, [head], watch):
        for logits, labels in labelled_logits(model, batches):
            seen(_used(read, logits, head).double(), labels, classes)
            read.clear()


def _used(read: list[Tensor], logits: Tensor, head: str) -> Tensor:
    """Return the inputs of the task head whose indices are the logits ``[rows, classes]``."""
    places = logits[:, 0]
    exact = logits.dtype in (torch.float32, torch.float64) and len(read) == 1 and len(read[0]) <= 2**24
    if not (
        exact
        and bool((logits == places.floor().unsqueeze(1)).all())
        and bool((places.diff() > 0).all())
        and bool(((places >= 0) & (places < len(read[0]))).all())
    ):
        raise _not_last(head)
    return read[0][places.long()]


def _not_last(head: str) -> FedrotError:
    return FedrotError(
        f"The outputs of the layer '{head}' are not the model's logits. Give the name of the model's "
        "last linear layer; see fedrot.head.head_of."
    )


def fit_head(
    sums: ClassSums, shrinkage: float = 0.1, bias: bool = True, priors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weight ``[classes, inputs]`` and bias ``[classes]`` of the task head, float64.

    Linear discriminant analysis: with the classes' means ``m_c``, the mean ``m`` of all rows and the
    covariance ``S`` inside the classes, shrunk to ``S_a = (1 - a) S + a tr(S) / inputs I``, the weights
    are ``S_a^-1 (m_c - m)`` and the biases ``-(m_c - m)^T S_a^-1 (m_c + m) / 2 + log(n_c / n)``. (``m``
    adds the same number to all logits, and keeps weights small.) Rotated features and sums give the same
    logits. Logits are often too large by a factor; see ``fedrot.temperature``.

    A class without rows gets weights 0. Its bias is the mean of the other classes' biases, weighted by
    rows, minus ``log(2 n)``. Its logit is then their mean logit minus ``log(2 n)``, never the largest.

    Args:
        sums: the sum over clients.
        shrinkage: ``a``, from 0 to 1.
        bias: whether the layer has a bias (the ``score`` of decoders has none). If False, the bias
            returned is 0, and the bias times ``u`` is added to the weights, where ``u`` is the ridge
            regression of 1 on the features: ``u^T h`` is as near to 1 as the same shrinkage allows.
            Logits are near those with a bias if some direction of the features has a mean that is large
            beside its deviation.
        priors: rows of each class, whose shares take the place of ``n_c / n`` in the biases.

    Raises:
        FedrotError: the shrinkage is not from 0 to 1.
        UpdateError: fewer than two classes have rows, features do not vary inside the classes, or their
            covariance is singular and not shrunk.
    """
    check_shrinkage(shrinkage)
    n, present = sums.counts.sum(), sums.counts > 0
    if int(present.sum()) < 2:
        raise UpdateError("A task head needs rows of at least two classes.")
    means, shares = sums.means(), sums.counts / n
    mean = shares @ means
    factor = _factor(sums._within(), sums.gram.trace() / n, shrinkage)
    weight = torch.cholesky_solve((means - mean).mT, factor).mT
    expected = shares if priors is None else priors / priors[present].sum()
    biases = -(weight * (means + mean)).sum(1) / 2 + torch.where(present, expected, 1.0).log()
    weight = torch.where(present.unsqueeze(1), weight, 0.0)
    # Classes without rows have a share of 0: ``shares @ biases`` is the mean over the others.
    biases = torch.where(present, biases, shares @ biases - (2 * n).log())
    if bias:
        return weight, biases
    total = sums.gram / n - torch.outer(mean, mean)
    factor = _factor(total, sums.gram.trace() / n, shrinkage)
    even = torch.cholesky_solve(mean.unsqueeze(1), factor).squeeze(1)
    return weight + torch.outer(biases, even / (1 + mean @ even)), torch.zeros_like(biases)


def check_shrinkage(shrinkage: float) -> None:
    """Raise ``FedrotError`` unless the shrinkage of ``fit_head`` is from 0 to 1."""
    if not 0 <= shrinkage <= 1:
        raise FedrotError(f"shrinkage is {shrinkage}; it must be from 0 to 1.")


def _factor(covariance: Tensor, size: Tensor, shrinkage: float) -> Tensor:
    """Return the Cholesky factor of a shrunk covariance; ``size`` is the features' mean square norm."""
    spread = covariance.trace() / len(covariance)
    if not spread * len(covariance) > _ROUNDING * size:
        raise UpdateError(
            "The features do not vary inside the classes, or so little beside their means that float64 "
            "sums do not show it. Collect from more rows, or subtract a constant from the features."
        )
    eye = torch.eye(len(covariance)).to(covariance)
    factor, failed = torch.linalg.cholesky_ex((1 - shrinkage) * covariance + shrinkage * spread * eye)
    if bool(failed) or not factor.diagonal().square().min() > _ROUNDING * spread:
        raise UpdateError(
            "The covariance of the features is singular: raise the shrinkage, or collect from more rows."
        )
    return factor


def with_head(tensors: Tensors, head: str, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """Return a model's tensors with another last layer; the other tensors are the same objects.

    Args:
        tensors: a state dict; the layer's tensors keep their dtypes and devices.
        head: the layer's name, from ``head_of``.
        weight: from ``fit_head``.
        bias: from ``fit_head``.

    Example: ``model.load_state_dict(with_head(model.state_dict(), head, *fit_head(total)))``

    Raises:
        FedrotError: there is no such layer; or it has another shape, no bias although ``bias`` is not 0,
            or a dtype whose range is too small.
    """
    found = dict(tensors)
    biased = f"{head}.bias" in tensors
    if not biased and bool(bias.any()):
        raise FedrotError(f"The layer '{head}' has no bias: fit it with fit_head(sums, bias=False).")
    new = {f"{head}.weight": weight, **({f"{head}.bias": bias} if biased else {})}
    for name, value in new.items():
        if name not in tensors or tensors[name].shape != value.shape:
            has = f"has shape {list(tensors[name].shape)}" if name in tensors else "is missing"
            raise FedrotError(
                f"The tensor '{name}' {has}, but the task head has {list(value.shape)}. Fit the head to "
                "sums of the same layer of the same model."
            )
        found[name] = value.detach().to(tensors[name])
        if not bool(torch.isfinite(found[name]).all()):
            raise FedrotError(
                f"The tensor '{name}' is {found[name].dtype}, which cannot hold the task head's values. "
                "Take a wider dtype for the task head, or raise the shrinkage."
            )
    return found
