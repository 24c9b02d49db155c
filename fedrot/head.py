"""The last layer of a classifier, fitted at the server in closed form from sums that
clients send.

The layer is a linear discriminant analysis (or ridge regression) of its own inputs over
the rows of all clients. Sources: Luo et al., "No Fear of Heterogeneity" (CCVR, NeurIPS
2021), who fit a task head to class means and covariances of clients; Legate et al.
(FedNCM, NeurIPS 2023) and Fanì et al. (Fed3R, ICML 2024), who also compute task heads
from sums over clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrot.collect.labelled import labelled_rows
from fedrot.collect.statistics import GRAMS, kind_named
from fedrot.errors import FedrotError, UpdateError
from fedrot.problems import (
    PROBLEMS,
    ROUNDING,
    SINGLE,
    Inverse,
    Problem,
    outputs_of,
    problem_of,
)
from fedrot.symmetry.resolve import TensorsOrShapes
from fedrot.tensors import Tensors, unusable

#: Names of the last linear layer in classifiers of transformers, without a prefix.
HEADS = ("classifier", "score", "classifier.out_proj", "classification_head.out_proj")

#: Accepted excess of features over their bounds: clients may compute in bfloat16.
_SLACK = 0.02


@dataclass(frozen=True, eq=False)
class ClassSums:
    """Sums over labelled rows of the inputs ``h`` of a task head; sums of clients add
    up (``+``).

    With several labels ``y`` for a row, and in a regression, the first of ``counts``
    and ``sums`` are the number of rows and the sum of ``h``; the others are, for each
    output, the sum of ``y`` and of ``y h``.

    Attributes:
        counts: rows of each class, float64 ``[classes]``; else ``[1 + outputs]``.
        sums: sum of ``h`` over the rows of each class, float64 ``[classes, inputs]``;
            else ``[1 + outputs, inputs]``.
        gram: sum of ``h h^T`` over all rows, float64 ``[inputs, inputs]``.
        problem: the problem_type, see ``fedrot.problems``.

    Raises:
        UpdateError: another dtype or shape, not finite, no rows, negative counts, a
            ``gram`` that is not symmetric, or sums that contradict each other.

    Example: ``total = sum(received[1:], received[0])``
    """

    counts: Tensor
    sums: Tensor
    gram: Tensor
    problem: str = SINGLE

    def __post_init__(self) -> None:
        classes, size = self.sums.shape if self.sums.ndim == 2 else (0, 0)
        shapes = {"counts": (classes,), "sums": (classes, size), "gram": (size, size)}
        for name, shape in shapes.items():
            value: Tensor = getattr(self, name)
            why = unusable(value)
            if not why and (
                value.dtype != torch.float64 or tuple(value.shape) != shape
            ):
                why = (
                    f"are {value.dtype} of shape {list(value.shape)}, not float64 "
                    f"{list(shape)}"
                )
            if not why and not bool(torch.isfinite(value).all()):
                why = (
                    "hold NaN or Inf. Check the client's training (learning rate, "
                    "mixed precision)"
                )
            if why:
                raise UpdateError(
                    f"Of the sums of features by class, the '{name}' {why}."
                )
        # The second moments inside the classes are a Gram matrix. Constant units leave
        # rounding errors.
        squares = self.gram.diagonal()
        within = self.within() + torch.diag(
            ROUNDING * (squares + ROUNDING * squares.sum()) / self.rows
        )
        if why := self._kind.check(self.counts, self.sums, squares, within):
            raise UpdateError(why)
        if problem := kind_named(GRAMS[1]).check(within, (classes, size)):
            raise UpdateError(
                f"The second moments of the features inside the classes {problem}. The "
                "sums contradict each other; send what collect_classes returns."
            )

    def __add__(self, other: ClassSums) -> ClassSums:
        """Return the sums over the rows of both; raises ``UpdateError`` if they are of
        other layers.
        """
        ours, theirs = ((one.problem, list(one.sums.shape)) for one in (self, other))
        if ours != theirs:
            raise UpdateError(
                f"Sums of features are of {ours} and of {theirs}; collect them at the "
                "same layer of the same model."
            )
        counts, sums = self.counts + other.counts, self.sums + other.sums
        return ClassSums(counts, sums, self.gram + other.gram, self.problem)

    @property
    def _kind(self) -> Problem:
        return PROBLEMS[self.problem]

    @property
    def rows(self) -> float:
        """Number of rows."""
        return float(self.counts[self._kind.centres].sum())

    def packed(self) -> dict[str, Tensor]:
        """Return what a client sends: ``counts``; ``sums`` in float32; and ``scatter``.

        The scatter is the upper triangle of ``rows * within()``, float32 ``[inputs
        (inputs + 1) / 2]``, and sums after the first of several labels and of a
        regression are of ``y (h - m)`` with the mean ``m`` of all rows, so that nothing
        of features with large means is lost.
        """
        sums, others = self.sums.clone(), self._kind.others
        sums[others] -= torch.outer(self.counts[others], self.means()[0])
        scatter = (self.rows * self.within())[*torch.triu_indices(*self.gram.shape)]
        return {"counts": self.counts, "sums": sums.float(), "scatter": scatter.float()}

    @classmethod
    def unpacked(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], problem: str = SINGLE
    ) -> ClassSums:
        """Return the sums that a client has ``packed``; ``shape`` is that of the task
        head's weight.

        Raises:
            UpdateError: other names, dtypes or shapes, or the errors of ``ClassSums``.
        """
        rows, inputs, kind = shape[0] + (problem != SINGLE), shape[1], PROBLEMS[problem]
        shapes = {
            "counts": (rows,),
            "sums": (rows, inputs),
            "scatter": (inputs * (inputs + 1) // 2,),
        }
        given = {
            name: (str(array.dtype), tuple(array.shape))
            for name, array in arrays.items()
        }
        dtypes = ("torch.float64", "torch.float32", "torch.float32")
        expected = {
            name: (dtype, shapes[name])
            for name, dtype in zip(shapes, dtypes, strict=True)
        }
        if given != expected:
            raise UpdateError(
                f"The sums of features are {given}, not {expected}. Send packed sums."
            )
        counts, sums = arrays["counts"], arrays["sums"].double()
        means = _means(counts[kind.centres], sums[kind.centres])
        gram = means.mT @ (means * counts[kind.centres].unsqueeze(1))
        upper = torch.zeros_like(gram)
        upper[*torch.triu_indices(inputs, inputs)] = arrays["scatter"].double()
        sums[kind.others] += torch.outer(counts[kind.others], means[0])
        return cls(counts, sums, gram + upper + upper.triu(1).mT, problem)

    @property
    def absent(self) -> Tensor:
        """Outputs of which the rows tell nothing, bool ``[outputs]``: classes or labels
        without rows.
        """
        return self._kind.absent(self.counts)

    def check_within(self, largest: Tensor) -> None:
        """Raise ``UpdateError`` if features are larger than
        ``feature_bounds.largest_inputs``.
        """
        most = largest * (1 + _SLACK)
        if bool((self.means().abs() > most).any()) or bool(
            (self.gram.diagonal() > self.rows * most**2).any()
        ):
            raise UpdateError(
                "The sums of features are larger than the model's features can be. "
                "Send what collect_classes returns."
            )

    def means(self) -> Tensor:
        """Return the classes' means ``[classes, inputs]``, 0 without rows; else that of
        all rows.
        """
        return _means(self.counts[self._kind.centres], self.sums[self._kind.centres])

    def within(self) -> Tensor:
        """Return the covariance inside the classes, or of all rows, float64 ``[inputs,
        inputs]``.
        """
        means, counts = self.means(), self.counts[self._kind.centres]
        return (self.gram - means.mT @ (means * counts.unsqueeze(1))) / self.rows


def _means(counts: Tensor, sums: Tensor) -> Tensor:
    return sums / torch.where(counts > 0, counts, 1.0).unsqueeze(1)


def head_of(config: object, tensors: TensorsOrShapes) -> str:
    """Return the name of the last linear layer of a classifier, such as
    ``classifier.out_proj``.

    Args:
        config: a transformers configuration, or its dictionary.
        tensors: the model's state dict, or the shapes in it.

    Example: ``head_of(model.config, model.state_dict())``

    Raises:
        FedrotError: the model has no such layer, like a language model, or more than
            one (pass the layer's name yourself); or its problem_type is unknown.
        SymmetryError: ``config`` is not a configuration.
    """
    problem, labels = problem_of(config), outputs_of(config)
    shapes = {name: tensors[f"{name}.weight"] for name in _named_heads(tensors)}
    found = [
        n
        for n, own in shapes.items()
        if tuple(getattr(own, "shape", own))[:1] == (labels,)
    ]
    if len(found) == 1 and (labels > 1 or problem != SINGLE):
        return found[0]
    which = f"more than one: {', '.join(found)}" if len(found) > 1 else "none"
    raise FedrotError(
        f"The task head of {labels} classes needs one of the names {', '.join(HEADS)}; "
        f"the model has {which}. Use a model that classifies sequences, tokens or "
        "images, with num_labels of at least 2, or give the name of its last linear "
        "layer yourself."
    )


def adapter_head_of(tensors: TensorsOrShapes) -> str:
    """Return the name of the task head that a PEFT adapter's clients train
    (``modules_to_save``).

    Args:
        tensors: the adapter's tensors, or their shapes.

    Example: ``adapter_head_of(adapter_tensors(model))``, such as
    ``base_model.model.classifier``

    Raises:
        FedrotError: the adapter has no task head, or more than one.
    """
    found = _named_heads(tensors)
    if len(found) == 1:
        return found[0]
    raise FedrotError(
        f"The adapter has {len(found)} layers named {', '.join(HEADS)}. Train one "
        "beside the adapter: LoraConfig(task_type='SEQ_CLS'), or modules_to_save."
    )


def _named_heads(tensors: TensorsOrShapes) -> list[str]:
    """Return the layers that are named like a task head."""
    ends = tuple(f".{head}.weight" for head in HEADS)
    return [
        name.removesuffix(".weight") for name in tensors if f".{name}".endswith(ends)
    ]


def collect_classes(
    model: nn.Module, batches: Iterable[Tensors], head: str, problem: str | None = None
) -> ClassSums:
    """Return the sums over a client's rows from which the server fits the task head.

    The features are the inputs of the task head at the positions of the logits: the
    last token of each row for decoders, every labelled token for token classifiers. The
    client sends only sums, so that secure aggregation works. Sums are float64, on the
    CPU; features are multiplied in float64.

    Args:
        model: a ``transformers`` classifier, usually the merged one, so that all
            clients compute the same features; it is run in evaluation mode, without
            gradients, and is not changed.
        batches: keyword arguments of the model's forward, with ``labels`` ``[rows]`` or
            ``[rows, tokens]``; rows with a negative label are left out. For several
            labels and regressions, labels are floating-point ``[rows, outputs]``; rows
            of NaN are left out.
        head: the name of the model's last linear layer, from ``head_of``.
        problem: a problem_type; None for that of ``model.config``.

    Example: ``sums = collect_classes(model, loader, head_of(model.config,
    model.state_dict()))``

    Raises:
        FedrotError: there is no such layer, its outputs are not the model's logits, or
            the batches have no labels for it.
        UpdateError: the features are not finite.
    """
    name = problem_of(getattr(model, "config", {}), problem)
    total: tuple[Tensor, ...] = (torch.zeros(()),) * 3
    for features, labels, outputs in labelled_rows(model, batches, name, head):
        targets = PROBLEMS[name].targets(labels, outputs).to(features)
        terms = (targets.sum(0), targets.mT @ features, features.mT @ features)
        total = tuple(
            sums + term.cpu() for sums, term in zip(total, terms, strict=True)
        )
    counts, sums, gram = total
    return ClassSums(counts, sums, gram, name)


def fit_head(
    sums: ClassSums,
    shrinkage: float = 0.1,
    bias: bool = True,
    priors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weight ``[outputs, inputs]`` and bias ``[outputs]`` of one task head; see
    ``fit_heads``.
    """
    weights, biases = fit_heads(sums, [shrinkage], bias, priors)
    return weights[0], biases[0]


def fit_heads(
    sums: ClassSums,
    shrinkages: Sequence[float],
    bias: bool = True,
    priors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights and biases of the task heads of several shrinkages.

    Linear discriminant analysis: with the classes' means ``m_c``, the mean ``m`` of all
    rows and the covariance ``S`` inside the classes, shrunk to ``S_a = (1 - a) S + a
    tr(S) / inputs I``, the weights are ``S_a^-1 (m_c - m)`` and the biases ``-(m_c -
    m)^T S_a^-1 (m_c + m) / 2 + log(n_c / n)``. (``m`` adds the same number to all
    logits, and keeps weights small.) Rotated features and sums give the same logits.
    Logits are often too large by a factor; see ``fedrot.temperature``.

    A class without rows gets weights 0. Its bias is the mean of the other classes'
    biases, weighted by rows, minus ``log(2 n)``. Its logit is then their mean logit
    minus ``log(2 n)``, never the largest.

    Several labels: the logit of a label is the log odds of the discriminant between
    rows with and without it. A label that no row has, or every row, gets weights 0, and
    its log odds with half a row added to both. Regression: ``(1 - a) S_a^-1`` times the
    covariances with the outputs, which is ridge regression, and the intercept of the
    means; ``S`` is the covariance of all rows.

    Args:
        sums: the sum over clients.
        shrinkages: values of ``a``, from 0 to 1.
        bias: whether the layer has a bias (the ``score`` of decoders has none). If
            False, the bias returned is 0, and the bias times ``u`` is added to the
            weights, where ``u`` is the ridge regression of 1 on the features: ``u^T h``
            is as near to 1 as the same shrinkage allows. Logits are near those with a
            bias if some direction of the features has a mean that is large beside its
            deviation.
        priors: ``counts`` whose shares take the place of ``n_c / n``; not used by a
            regression.

    Returns:
        float64 ``[shrinkages, outputs, inputs]`` and ``[shrinkages, outputs]``, from
        one eigendecomposition.

    Example: ``weights, biases = fit_heads(total, (0.01, 0.1, 0.5))``

    Raises:
        FedrotError: a shrinkage is not from 0 to 1, or there is none.
        UpdateError: fewer than two classes have rows, features do not vary inside the
            classes, or their covariance is singular and not shrunk.
    """
    if not shrinkages:
        raise FedrotError(
            "There is no shrinkage to fit a task head with. Give at least one."
        )
    size, (values, vectors) = (
        sums.gram.trace() / sums.rows,
        torch.linalg.eigh(sums.within()),
    )
    kind, found = PROBLEMS[sums.problem], []
    for shrinkage in shrinkages:
        if not 0 <= shrinkage <= 1:
            raise FedrotError(f"shrinkage is {shrinkage}; it must be from 0 to 1.")
        inverse = Inverse(values, vectors, size, shrinkage)
        weight, own = kind.fit(sums.counts, sums.sums, inverse, priors)
        if not bias:
            one = inverse.of_one(sums.means(), sums.counts[kind.centres] / sums.rows)
            weight, own = weight + torch.outer(own, one), torch.zeros_like(own)
        found.append((weight, own))
    weights, biases = zip(*found, strict=True)
    return torch.stack(weights), torch.stack(biases)


def with_head(
    tensors: Tensors, head: str, weight: Tensor, bias: Tensor
) -> dict[str, Tensor]:
    """Return a model's tensors with another last layer; the other tensors are the same
    objects.

    Args:
        tensors: a state dict; the layer's tensors keep their dtypes and devices.
        head: the layer's name, from ``head_of``.
        weight: from ``fit_head``.
        bias: from ``fit_head``.

    Example: ``model.load_state_dict(with_head(model.state_dict(), head,
    *fit_head(total)))``

    Raises:
        FedrotError: there is no such layer; or it has another shape, no bias although
            ``bias`` is not 0, or a dtype whose range is too small.
    """
    found = dict(tensors)
    biased = f"{head}.bias" in tensors
    if not biased and bool(bias.any()):
        raise FedrotError(
            f"The layer '{head}' has no bias: fit it with fit_head(sums, bias=False)."
        )
    new = {f"{head}.weight": weight, **({f"{head}.bias": bias} if biased else {})}
    for name, value in new.items():
        if name not in tensors or tensors[name].shape != value.shape:
            has = (
                f"has shape {list(tensors[name].shape)}"
                if name in tensors
                else "is missing"
            )
            raise FedrotError(
                f"The tensor '{name}' {has}, but the task head has "
                f"{list(value.shape)}. Fit the head to sums of the same layer of the "
                "same model."
            )
        found[name] = value.detach().to(tensors[name])
        if not bool(torch.isfinite(found[name]).all()):
            raise FedrotError(
                f"The tensor '{name}' is {found[name].dtype}, which cannot hold the "
                "task head's values. Take a wider dtype for the task head, or raise "
                "the shrinkage."
            )
    return found
