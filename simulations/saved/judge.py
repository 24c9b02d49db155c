"""``Judge``: saved models and their mean, evaluated on a user's data; task heads fitted to the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedrot.errors import FedrotError
from fedrot.head import collect_classes, fit_heads, head_of, with_head
from fedrot.problems import REGRESSION, SEVERAL, SINGLE
from fedrot.simulations.config import TASKS, SimulationConfig
from fedrot.simulations.saved.load import SavedModel
from fedrot.simulations.tasks.task import Task, task_of
from fedrot.simulations.tasks.training import evaluate, step_batches
from fedrot.strategies.sums.choice import SHRINKAGES
from fedrot.temperature import TEMPERATURES, Heads, compare_losses, smallest
from fedrot.tensors import Tensors

#: Tasks of models, by the end of the class's name.
_TASK_OF = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "ner",
    "ForImageClassification": "image",
    "ForMaskedLM": "mlm",
    "ForCausalLM": "clm",
    "LMHeadModel": "clm",
}
_KIND_OF = {SINGLE: "single", SEVERAL: "multi", REGRESSION: "regression"}
#: Maximum numbers of training rows, of held-out rows, and of tokens of a text.
_TRAIN, _TEST, _LENGTH = 8000, 2000, 256
#: Share of training rows on which fitted heads are compared, and rows per batch of features.
_HELD, _BATCH = 0.2, 64

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Judge:
    """Evaluates models of one class on the held-out rows of a task.

    Attributes:
        model: in float32; it receives the tensors of one model after the other.
        dtypes: to which tensors are rounded before, by name.
        order: the model's outputs in the order of the data's classes; empty for language models.
    """

    task: Task
    model: Any
    dtypes: Mapping[str, torch.dtype]
    order: list[int]

    @classmethod
    def of(cls, saved: SavedModel, data: Mapping[str, Any]) -> Judge:
        """Read data for models like ``saved``; ``data`` has fields of an experiment.

        Raises:
            FedrotError: no task is known for the model's class, or it lacks a class of the data.
            DataError: the data cannot be used.
        """
        kind, config, outputs = type(saved.model).__name__, saved.config, saved.labels
        name = next((task for end, task in _TASK_OF.items() if kind.endswith(end)), None)
        if name is None:
            raise FedrotError(
                f"'{saved.name}' is a {kind}, which --data cannot evaluate. Give models of classes "
                f"such as Bert{', Bert'.join([*_TASK_OF][:4])} or LlamaForCausalLM; or leave --data out."
            )
        positions = getattr(config, "max_position_embeddings", 0) or _LENGTH
        labels = _KIND_OF.get(config.problem_type or "", "regression" if len(outputs) == 1 else "")
        settings = {
            **data,
            "task": name,
            "model": saved.name,
            "label_kind": labels if TASKS[name].classifies else "",
            "max_length": min(_LENGTH, positions - 2),  # RoBERTa leaves two positions out.
            "train_limit": _TRAIN,
            "test_limit": _TEST,
        }
        task, model = task_of(SimulationConfig.model_validate(settings).to_json()), saved.build()
        order = [] if name in ("mlm", "clm") else _order(task, saved)
        if name == "ner":
            tags: Any = [*task.data.tags, *(outputs[place] for place in order[len(task.data.tags) :])]
            task = replace(task, objective=replace(task.objective, tags=tuple(tags)))
        if order:
            model.register_forward_hook(lambda _, given, out: _reordered(out, order))
        if getattr(model.config, "pad_token_id", None) is None:
            model.config.pad_token_id = getattr(task.test, "pad_id", None)
        return cls(task, model, {name: t.dtype for name, t in saved.tensors.items()}, order)

    def verdict(
        self, models: Sequence[SavedModel], merged: Tensors, plain: Tensors | None, fit_head: bool
    ) -> tuple[Tensors, list[str]]:
        """Return the merged model, with a fitted head if that is better, and sentences.

        The first sentence compares the merged model with the best of the models.

        Args:
            plain: the mean of the models as they are, if ``merged`` is another one.
            fit_head: whether a task head is fitted.
        """
        single = {f"'{saved.name}'": self.scores(saved.tensors) for saved in models}
        others = {"averaged as they are": self.scores(plain)} if plain else {}
        found, said, best = (
            self.scores(merged),
            list[str](),
            max(single, key=lambda n: _worth(single[n])),
        )
        if fit_head:
            fitted, why = self.fitted(merged)
            said.append(why)
            if fitted is not None:
                others["merged, before the head was fitted"] = found
                merged, found = fitted, self.scores(fitted)
        metric, value = next(iter(found.items()))
        given = " and ".join(f"{scores[metric]:.3f} ({name})" for name, scores in single.items())
        how, advice = "better than", ""
        if _worth(found) == _worth(single[best]):
            how = "as good as"
        elif _worth(found) < _worth(single[best]):
            how, advice = "worse than", f" Use {best} as it is."
            if any(_worth(scores) > _worth(single[best]) for scores in others.values()):
                advice = " Repeat the command with --parts none, without --fit-head."
            elif self.order and not fit_head:
                advice = f" Try --fit-head, or use {best} as it is."
        verdict = (
            f"The merged model is {how} the best single one by {value - single[best][metric]:+.3f}: "
            f"{metric} {value:.3f} against {given} on {len(self.task.test)} held-out rows.{advice}"
        )
        lines = [f"{name}: {_shown(scores)}." for name, scores in (single | others).items()]
        return merged, [verdict, *said, *lines, f"merged: {_shown(found)}."]

    def scores(self, tensors: Tensors) -> Scores:
        """Return the metrics on held-out rows, the headline metric first and the loss last."""
        self._load(tensors)
        return evaluate(self.model, self.task, self.task.test, np.arange(len(self.task.test)))

    def fitted(self, tensors: Tensors) -> tuple[Tensors | None, str]:
        """Return a model with the best task head fitted to training rows, and a sentence about it.

        Shrinkage and temperature are those with the smallest loss on a fifth of the training rows, to
        which no head is fitted. The model is None if its own head is as good at its best temperature.

        Raises:
            FedrotError: the model has no task head, or too few rows.
        """
        if not self.order:
            raise FedrotError("--fit-head is for classifiers and regressions. Leave it out.")
        self._load(tensors)
        kind = SINGLE if self.task.config.task == "ner" else self.task.data.kind
        problem = next(name for name, known in _KIND_OF.items() if kind in (name, known))
        head, rows = head_of(self.model.config, tensors), len(self.task.train)
        held, kept = np.split(np.random.default_rng(0).permutation(rows), [math.ceil(_HELD * rows)])
        sums = collect_classes(self.model, self._batches(kept), head, problem)
        weights, biases = fit_heads(sums, SHRINKAGES, f"{head}.bias" in tensors)
        own = tensors[f"{head}.weight"].double()[self.order]
        bias = tensors.get(f"{head}.bias", torch.zeros(len(own))).double()[self.order]
        weights, biases = torch.cat([own[None], weights]), torch.cat([bias[None], biases])
        heads = Heads(weights, biases, torch.full((len(weights),), -1))
        compared = compare_losses([self.model], self._batches(held), head, [heads], problem)
        losses = compared.losses / compared.rows
        best = 1 + int(losses[1:].amin(1).argmin())
        place = smallest(losses[best])
        before, after, temperature = (
            float(losses[0].min()),
            float(losses[best, place]),
            TEMPERATURES[place],
        )
        said = f"loss {after:.3f} on {len(held)} other training rows, {before:.3f} without the fit."
        if not after < before:
            return None, f"The task head stays as it is, a fitted one is not better: {said}"
        back = np.argsort(self.order)
        new = with_head(tensors, head, *(part[best][back] / temperature for part in (weights, biases)))
        how = f"shrinkage {SHRINKAGES[best - 1]:g}, temperature {temperature:.2f}"
        return new, f"The task head is fitted to {len(kept)} training rows ({how}): {said}"

    def _load(self, tensors: Tensors) -> None:
        rounded = {name: tensor.to(self.dtypes[name]) for name, tensor in tensors.items()}
        self.model.load_state_dict(rounded, strict=False)  # A mean has no names of tied tensors.

    def _batches(self, rows: np.ndarray) -> list[Any]:
        return list(step_batches(self.task, self.model, rows, len(rows), _BATCH, 0))


def _worth(scores: Scores) -> float:
    """Return the headline metric, larger for better models; NaN is worst."""
    metric, value = next(iter(scores.items()))
    return -math.inf if math.isnan(value) else -value if "perplexity" in metric else value


def _shown(scores: Scores) -> str:
    metrics = dict.fromkeys([*[*scores][:2], "loss"])
    return ", ".join(f"{metric} {scores[metric]:.3f}" for metric in metrics)


def _reordered(out: Any, order: list[int]) -> Any:
    out.logits = out.logits[..., order]
    return out


def _order(task: Task, saved: SavedModel) -> list[int]:
    """Return a model's outputs, those of the data's classes first and in their order.

    Outputs are found by name, and unnamed ones (``LABEL_0``) by number. Raises ``FedrotError``.
    """
    data, outputs = task.data, [name.strip().casefold() for name in saved.labels]
    classes = [str(name) for name in getattr(data, "tags", data.label_names)]
    wanted, numbers = [name.strip().casefold() for name in classes], range(len(outputs))
    unnamed, known = outputs == [f"label_{n}" for n in numbers], {*outputs}
    if data.kind == "regression" or (unnamed and len(wanted) == len(outputs) and known != {*wanted}):
        outputs = wanted
    elif unnamed and not {*wanted} <= known:
        outputs = [str(n) for n in numbers]
    missing = [name for name, key in zip(classes, wanted, strict=True) if outputs.count(key) != 1]
    several = data.kind == "multi" and task.config.task != "ner" and len(wanted) != len(outputs)
    if missing or several or len(outputs) != len(saved.labels):
        raise FedrotError(
            f"The data has the classes {', '.join(classes)}; the outputs of '{saved.name}' are "
            f"{', '.join(saved.labels)}. Give data with these classes, or correct the models' id2label."
        )
    first = [outputs.index(key) for key in wanted]
    return first + [n for n in numbers if n not in first]
