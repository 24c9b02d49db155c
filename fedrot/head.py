"""The last layer of a classifier, fitted at the server in closed form from sums that clients send.

The layer is a linear discriminant analysis of its own inputs, over the rows of all clients. Sources:
Luo et al., "No Fear of Heterogeneity" (CCVR, NeurIPS 2021), who fit a task head to class means and
covariances of clients; Legate et al. (FedNCM, NeurIPS 2023) and Fanì et al. (Fed3R, ICML 2024), who also
compute task heads from sums over clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedrot.collect.head_inputs import read_inputs
from fedrot.collect.statistics import GRAMS, kind_named
from fedrot.errors import FedrotError, UpdateError
from fedrot.problems import (
    PROBLEMS,
    SINGLE,
    Problem,
    checked_problem,
    outputs_of,
    problem_for,
    problem_of,
)
from fedrot.spectrum import ROUNDING, Spectrum
from fedrot.symmetry.resolve import TensorsOrShapes, settings_of
from fedrot.tensors import Tensors, unusable

#: Names of the last linear layer in classifiers of transformers, without a prefix.
HEADS = ("classifier", "score", "classifier.out_proj", "classification_head.out_proj")

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

    With several labels ``y`` for a row, and in a regression, the first of ``counts`` and ``sums`` are
    the number of rows and the sum of ``h``; the others are, for each output, the sum of ``y`` and of
    ``y h``.

    Attributes:
        counts: rows of each class, float64 ``[classes]``; else ``[1 + outputs]``.
        sums: sum of ``h`` over the rows of each class, float64 ``[classes, inputs]``; else ``[1 +
            outputs, inputs]``.
        gram: sum of ``h h^T`` over all rows, float64 ``[inputs, inputs]``.
        problem: the problem_type, see ``fedrot.problems``.

    Raises:
        UpdateError: another dtype or shape, not finite, no rows, negative counts, a ``gram`` that is not
            symmetric, or sums that contradict each other.

    Example: ``total = sum(received[1:], received[0])``
    """

    counts: Tensor
    sums: Tensor
    gram: Tensor
    problem: str = SINGLE

    def __post_init__(self) -> None:
        classes, size = self.sums.shape if self.sums.ndim == 2 else (0, 0)
        shapes = {"counts": (classes,), "sums": (classes, size), "gram": (size, size)}
        _check_arrays(vars(self), {name: (torch.float64, shape) for name, shape in shapes.items()})
        squares = self.gram.diagonal()
        if problem := self._kind.check(self.counts, self.sums, squares):
            raise UpdateError(problem)
        # The second moments inside the classes are a Gram matrix. Constant units leave rounding errors.
        within = self.within() + torch.diag(ROUNDING * squares / self.rows)
        why = kind_named(GRAMS[1]).check(within, (classes, size))
        if not why and self._kind.contradicts(self.counts, self.sums, within):
            why = "are smaller than the differences between rows with and without a label"
        if why:
            raise UpdateError(
                f"The second moments of the features inside the classes {why}. The sums "
                "contradict each other; send what collect_classes returns."
            )

    def __add__(self, other: ClassSums) -> ClassSums:
        """Return the sums over the rows of both; raises ``UpdateError`` if they are of other layers."""
        if (self.sums.shape, self.problem) != (other.sums.shape, other.problem):
            raise UpdateError(
                f"Sums of features have shapes {list(self.sums.shape)} and {list(other.sums.shape)}, "
                f"of a {self.problem} and a {other.problem}; collect them at the same layer of the same "
                "model."
            )
        counts, sums = self.counts + other.counts, self.sums + other.sums
        return ClassSums(counts, sums, self.gram + other.gram, self.problem)

    def __mul__(self, factor: float) -> ClassSums:
        """Return the sums as if every row counted ``factor`` times."""
        return ClassSums(self.counts * factor, self.sums * factor, self.gram * factor, self.problem)

    @property
    def rows(self) -> float:
        """Number of rows."""
        return float(self.counts[self._kind.centres].sum())

    def packed(self) -> dict[str, Tensor]:
        """Return what a client sends, in a quarter of the bytes; ``unpacked`` returns the sums.

        ``counts`` are float64. ``sums`` are float32; with several labels and in a regression, all but
        the first are about the mean of the rows. ``scatter`` is float32 ``[inputs (inputs + 1) / 2]``,
        the upper triangle of ``rows * within()``: float32 loses nothing of features with large means.
        """
        sums, others, mean = self.sums.clone(), self._kind.others, self.means().mean(0)
        sums[others] -= torch.outer(self.counts[others], mean)
        scatter = (self.within() * self.rows)[_upper(len(self.gram))]
        return {"counts": self.counts, "sums": sums.float(), "scatter": scatter.float()}

    @classmethod
    def unpacked(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], problem: str = SINGLE
    ) -> ClassSums:
        """Return the sums that a client has packed; the rounding of float32 is all that is lost.

        Args:
            arrays: ``counts``, ``sums`` and ``scatter`` from ``packed``.
            shape: of the task head's weight, ``(outputs, inputs)``.
            problem: a problem_type, see ``fedrot.problems``.

        Raises:
            UpdateError: other names, dtypes or shapes, or the errors of ``ClassSums``.
        """
        kind, (outputs, inputs) = PROBLEMS[checked_problem(problem)], shape
        size = outputs + (kind.centres == slice(1))
        expected = {
            "counts": (torch.float64, (size,)),
            "sums": (torch.float32, (size, inputs)),
            "scatter": (torch.float32, (inputs * (inputs + 1) // 2,)),
        }
        if set(arrays) != set(expected):
            raise UpdateError(f"The sums have {', '.join(arrays)}, not {', '.join(expected)}.")
        _check_arrays(arrays, expected)
        counts, sums = arrays["counts"], arrays["sums"].double()
        gram = torch.zeros(inputs, inputs, dtype=torch.float64)
        gram[_upper(inputs)] = arrays["scatter"].double()
        rows = counts[kind.centres]
        means = _means(rows, sums[kind.centres])
        gram = gram + gram.triu(1).mT + means.mT @ (means * rows.unsqueeze(1))
        sums[kind.others] += torch.outer(counts[kind.others], means.mean(0))
        return cls(counts, sums, gram, problem)

    @property
    def absent(self) -> Tensor:
        """Outputs of which the rows tell nothing, bool ``[outputs]``: classes or labels without rows."""
        return self._kind.absent(self.counts)

    def check_within(self, largest: Tensor) -> None:
        """Raise ``UpdateError`` if features are larger than they can be, see ``largest_inputs``."""
        most = largest * (1 + _SLACK)
        if bool((self.means().abs() > most).any()) or bool(
            (self.gram.diagonal() > self.rows * most**2).any()
        ):
            raise UpdateError(
                "The sums of features are larger than the model's features can be. Send what "
                "collect_classes returns."
            )

    def means(self) -> Tensor:
        """Return the classes' means ``[classes, inputs]``, 0 without rows; else that of all rows."""
        return _means(self.counts[self._kind.centres], self.sums[self._kind.centres])

    def within(self) -> Tensor:
        """Return the covariance inside the classes, or of all rows, float64 ``[inputs, inputs]``."""
        means, counts = self.means(), self.counts[self._kind.centres]
        return (self.gram - means.mT @ (means * counts.unsqueeze(1))) / self.rows

    @property
    def _kind(self) -> Problem:
        return PROBLEMS[checked_problem(self.problem)]


def _means(counts: Tensor, sums: Tensor) -> Tensor:
    return sums / torch.where(counts > 0, counts, 1.0).unsqueeze(1)


def _upper(size: int) -> Tensor:
    """Return the mask of the upper triangle of a matrix, bool ``[size, size]``."""
    return torch.ones(size, size, dtype=torch.bool).triu()


def _check_arrays(
    values: Mapping[str, Any], expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    """Raise ``UpdateError`` if arrays of sums have another dtype or shape, or are not finite."""
    for name, (dtype, shape) in expected.items():
        value: Tensor = values[name]
        why = unusable(value)
        if not why and (value.dtype != dtype or tuple(value.shape) != shape):
            named = str(dtype).removeprefix("torch.")
            why = f"are {value.dtype} of shape {list(value.shape)}, not {named} {list(shape)}"
        if not why and not bool(torch.isfinite(value).all()):
            why = "hold NaN or Inf. Check the client's training (learning rate, mixed precision)"
        if why:
            raise UpdateError(f"Of the sums of features by class, the '{name}' {why}.")


def head_of(config: object, tensors: TensorsOrShapes) -> str:
    """Return the name of the last linear layer of a classifier, such as ``classifier.out_proj``.

    Args:
        config: a transformers configuration, or its dictionary.
        tensors: the model's state dict, or the shapes in it.

    Example: ``head_of(model.config, model.state_dict())``

    Raises:
        FedrotError: the model has no such layer, like a language model, or more than one (pass the
            layer's name yourself); or its problem_type is unknown.
        SymmetryError: ``config`` is not a configuration.
    """
    problem, labels = problem_of(config), outputs_of(config)
    found = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if f".{name}".endswith(tuple(f".{head}.weight" for head in HEADS))
        and tuple(getattr(tensor, "shape", tensor))[:1] == (labels,)
    ]
    if len(found) == 1 and (labels > 1 or problem != SINGLE):
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


def collect_classes(
    model: nn.Module, batches: Iterable[Tensors], head: str, problem: str | None = None
) -> ClassSums:
    """Return the sums over a client's rows from which the server fits the task head.

    The features are the inputs of the task head at the positions of the logits: the last token of each
    row for decoders, every labelled token for token classifiers. The client sends only sums, so that
    secure aggregation works. Sums are float64, on the CPU; features are multiplied in float64.

    Args:
        model: a ``transformers`` classifier, usually the merged one, so that all clients compute the
            same features; it is run in evaluation mode, without gradients, and is not changed.
        batches: keyword arguments of the model's forward, with ``labels`` ``[rows]`` or
            ``[rows, tokens]``; rows with a negative label are left out. For several labels and
            regressions, labels are floating-point ``[rows, outputs]``; rows of NaN are left out.
        head: the name of the model's last linear layer, from ``head_of``.
        problem: a problem_type; None for that of ``model.config``.

    Example: ``sums = collect_classes(model, loader, head_of(model.config, model.state_dict()))``

    Raises:
        FedrotError: there is no such layer, its outputs are not the model's logits, or the batches have
            no labels for it.
        UpdateError: the features are not finite.
    """
    problem, found = problem_for(model, problem), list[Tensor]()

    def add(features: Tensor, labels: Tensor, outputs: int) -> None:
        targets = PROBLEMS[problem].targets(labels, outputs).to(features)
        terms = (targets.sum(0), targets.mT @ features, features.mT @ features)
        sums = found or [torch.zeros(term.shape, dtype=torch.float64) for term in terms]
        found[:] = [total + term.cpu() for total, term in zip(sums, terms, strict=True)]

    read_inputs(model, batches, head, problem, add)
    counts, sums, gram = found
    return ClassSums(counts, sums, gram, problem)


def fit_head(
    sums: ClassSums, shrinkage: float = 0.1, bias: bool = True, priors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weight ``[outputs, inputs]`` and bias ``[outputs]`` of one task head; see ``fit_heads``."""
    weights, biases = fit_heads(sums, [shrinkage], bias, priors)
    return weights[0], biases[0]


def fit_heads(
    sums: ClassSums, shrinkages: Sequence[float], bias: bool = True, priors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights and biases of the task heads of several shrinkages.

    Linear discriminant analysis: with the classes' means ``m_c``, the mean ``m`` of all rows and the
    covariance ``S`` inside the classes, shrunk to ``S_a = (1 - a) S + a tr(S) / inputs I``, the weights
    are ``S_a^-1 (m_c - m)`` and the biases ``-(m_c - m)^T S_a^-1 (m_c + m) / 2 + log(n_c / n)``. (``m``
    adds the same number to all logits, and keeps weights small.) Rotated features and sums give the same
    logits. Logits are often too large by a factor; see ``fedrot.temperature``.

    A class without rows gets weights 0. Its bias is the mean of the other classes' biases, weighted by
    rows, minus ``log(2 n)``. Its logit is then their mean logit minus ``log(2 n)``, never the largest.

    One eigendecomposition of ``S`` gives the heads of all shrinkages.

    Args:
        sums: the sum over clients.
        shrinkages: values of ``a``, from 0 to 1.
        bias: whether the layer has a bias (the ``score`` of decoders has none). If False, the bias
            returned is 0, and the bias times ``u`` is added to the weights, where ``u`` is the ridge
            regression of 1 on the features: ``u^T h`` is as near to 1 as the same shrinkage allows.
            Logits are near those with a bias if some direction of the features has a mean that is large
            beside its deviation.
        priors: rows of each class, whose shares take the place of ``n_c / n`` in the biases.

    Returns:
        float64 ``[shrinkages, outputs, inputs]`` and ``[shrinkages, outputs]``.

    Example: ``weights, biases = fit_heads(total, (0.01, 0.1, 0.5))``

    Raises:
        FedrotError: a shrinkage is not from 0 to 1, or there is none.
        UpdateError: fewer than two classes have rows, features do not vary inside the classes, or their
            covariance is singular and not shrunk.
    """
    for shrinkage in shrinkages:
        check_shrinkage(shrinkage)
    kind, spectrum = PROBLEMS[sums.problem], Spectrum(sums.within(), sums.gram.trace() / sums.rows)
    weights, biases = [], []
    for shrinkage in shrinkages:
        weight, own = kind.fit(sums.counts, sums.sums, spectrum, shrinkage, priors)
        weights.append(weight if bias else weight + torch.outer(own, _of_one(sums, spectrum, shrinkage)))
        biases.append(own if bias else torch.zeros_like(own))
    if not weights:
        raise FedrotError("There is no shrinkage to fit a task head with; give at least one.")
    return torch.stack(weights), torch.stack(biases)


def _of_one(sums: ClassSums, spectrum: Spectrum, shrinkage: float) -> Tensor:
    """Return the ridge regression of 1 on the features, ``[inputs]``.

    The covariance of all rows is that inside the classes and the classes' means' (Woodbury).
    """
    shares = sums.counts[PROBLEMS[sums.problem].centres] / sums.rows
    means = sums.means()
    mean = shares @ means
    between = shares.sqrt().unsqueeze(1) * (means - mean)
    spread = (spectrum.trace + between.square().sum()) / len(mean)
    between = (1 - shrinkage) ** 0.5 * between
    even, *columns = spectrum.solve(torch.cat([mean.unsqueeze(0), between]), shrinkage, spread)
    solved = torch.stack(columns)
    inner = torch.eye(len(between)).to(between) + between @ solved.mT
    even = even - solved.mT @ torch.linalg.solve(inner, between @ even)
    return even / (1 + mean @ even)


def check_shrinkage(shrinkage: float) -> None:
    """Raise ``FedrotError`` unless the shrinkage of ``fit_head`` is from 0 to 1."""
    if not 0 <= shrinkage <= 1:
        raise FedrotError(f"shrinkage is {shrinkage}; it must be from 0 to 1.")


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


def adapter_head_of(tensors):  # temporary
    raise FedrotError("not yet")
