"""``Judge``: saved models and their mean, evaluated on a user's data; task heads fitted to the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedrot.errors import FedrotError, UpdateError
from fedrot.head import collect_classes, fit_heads, head_of, with_head
from fedrot.problems import REGRESSION, SEVERAL, SINGLE
from fedrot.simulations.saved.load import SavedModel
from fedrot.simulations.settings import TASKS, Experiment
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

#: Name of the mean without alignment.
_PLAIN = "averaged as they are"

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Judge:
    """Evaluates models of one class on the held-out rows of a task.

    ``model`` receives the tensors of one model after the other. ``order`` has its outputs in the order
    of the data's classes; it is empty for language models.
    """

    task: Task
    model: Any
    order: list[int]

    @classmethod
    def of(cls, saved: SavedModel, data: Mapping[str, Any]) -> Judge:
        """Read data for models like ``saved``; ``data`` has fields of an experiment."""
        kind, config, outputs = type(saved.model).__name__, saved.config, saved.labels
        name = next((task for end, task in _TASK_OF.items() if kind.endswith(end)), None)
        if name is None:
            raise FedrotError(
                f"'{saved.name}' is a {kind}, which --data cannot evaluate. Give models of classes "
                f"such as Bert{', Bert'.join([*_TASK_OF][:4])} or LlamaForCausalLM; or leave --data out."
            )
        labels = _KIND_OF.get(config.problem_type or "", "regression" if len(outputs) == 1 else "")
        positions = getattr(config, "max_position_embeddings", 0) or _LENGTH
        settings = {
            **data,
            "task": name,
            "model": saved.name,
            "label_kind": labels if TASKS[name].classifies else "",
            "max_length": min(_LENGTH, positions - 2),  # RoBERTa leaves two positions out.
            "train_limit": _TRAIN,
            "test_limit": _TEST,
        }
        task, model = task_of(Experiment.model_validate(settings).to_json()), saved.build()
        order = [] if name in ("mlm", "clm") else _order(task, saved)
        if name == "ner":
            read: Any = task
            tags = *read.data.tags, *(outputs[place] for place in order[len(read.data.tags) :])
            named = replace(read.data, tags=tags)
            task = replace(task, data=named, objective=type(read.objective)(task.experiment, named))
        if order:
            model.register_forward_hook(lambda _, given, out: _reordered(out, order))
        if getattr(model.config, "pad_token_id", None) is None:
            model.config.pad_token_id = getattr(task.test, "pad_id", None)
        return cls(task, model, order)

    def verdict(
        self, models: Sequence[SavedModel], merged: Tensors, plain: Tensors | None, fit_head: bool
    ) -> tuple[Tensors, list[str]]:
        """Return the merged model, with a fitted head if that is better, and sentences.

        The first sentence compares it with the best of the models. ``plain`` is their mean without
        alignment, if ``merged`` is another one.
        """
        single = {f"'{saved.name}'": self.scores(saved.tensors) for saved in models}
        others = {_PLAIN: self.scores(plain)} if plain else {}
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
            better = [name for name in others if _worth(others[name]) > _worth(single[best])]
            if better:
                unaligned = better[0] == _PLAIN
                advice = f" Repeat it {'with --parts none' if unaligned else 'without --fit-head'}."
            elif self.order and not fit_head:
                advice = f" Try --fit-head, or use {best} as it is."
        verdict = (
            f"The merged model is {how} the best single one by {value - single[best][metric]:+.3f}: "
            f"{metric} {value:.3f} against {given} on {len(self.task.test)} held-out rows.{advice}"
        )
        lines = [_line(*item) for item in (single | others | {"merged": found}).items()]
        return merged, [verdict, *said, *lines]

    def scores(self, tensors: Tensors) -> Scores:
        """Return the metrics on held-out rows, the headline metric first and the loss last."""
        self.model.load_state_dict(tensors, strict=False)  # A mean has no names of tied tensors.
        return evaluate(self.model, self.task, self.task.test, np.arange(len(self.task.test)))

    def fitted(self, tensors: Tensors) -> tuple[Tensors | None, str]:
        """Return a model with the best task head fitted to training rows, and a sentence about it.

        Shrinkage and temperature are those with the smallest loss on a fifth of the training rows, to
        which no head is fitted. The model is None if its own head is as good at its best temperature.
        """
        if not self.order:
            raise FedrotError("--fit-head is for classifiers and regressions. Leave it out.")
        self.model.load_state_dict(tensors, strict=False)
        head, rows = head_of(self.model.config, tensors), len(self.task.train)
        kind = "single" if self.task.experiment.task == "ner" else self.task.data.kind
        problem = next(name for name, known in _KIND_OF.items() if known == kind)
        held, kept = np.split(np.random.default_rng(0).permutation(rows), [math.ceil(_HELD * rows)])
        stays = "The task head stays as it is"
        try:
            sums = collect_classes(self.model, self._batches(kept), head, problem)
            new = fit_heads(sums, SHRINKAGES, f"{head}.bias" in tensors)
        except UpdateError as error:
            return None, f"{stays}. {error}"
        weight = tensors[f"{head}.weight"].double()
        own = weight, tensors.get(f"{head}.bias", torch.zeros(len(weight))).double()
        parts = [torch.cat([old[None, self.order], fits]) for old, fits in zip(own, new, strict=True)]
        heads = Heads(parts[0], parts[1], torch.full((1 + len(SHRINKAGES),), -1))
        compared = compare_losses([self.model], self._batches(held), head, [heads], problem)
        losses = compared.losses / compared.rows
        best = 1 + int(losses[1:].amin(1).argmin())
        place = smallest(losses[best])
        before, after, temperature = losses[0].min(), losses[best, place], TEMPERATURES[place]
        said = f"loss {after:.3f} on {len(held)} other training rows, {before:.3f} without the fit."
        if not after < before:
            return None, f"{stays}, a fitted one is not better: {said}"
        back = np.argsort(self.order)
        found = with_head(tensors, head, *(part[best][back] / temperature for part in parts))
        how = f"shrinkage {SHRINKAGES[best - 1]:g}, temperature {temperature:.2f}"
        return found, f"The task head is fitted to {len(kept)} training rows ({how}): {said}"

    def _batches(self, rows: np.ndarray) -> list[Any]:
        return list(step_batches(self.task, self.model, rows, len(rows), _BATCH, 0))


def _worth(scores: Scores) -> float:
    """Return the headline metric, larger for better models; NaN is worst."""
    metric, value = next(iter(scores.items()))
    return -math.inf if math.isnan(value) else -value if "perplexity" in metric else value


def _line(name: str, scores: Scores) -> str:
    metrics = dict.fromkeys([*[*scores][:2], "loss"])
    return f"{name}: {', '.join(f'{metric} {scores[metric]:.3f}' for metric in metrics)}."


def _reordered(out: Any, order: list[int]) -> Any:
    out.logits = out.logits[..., order]
    return out


def _some(names: list[str]) -> str:
    return ", ".join(names if len(names) < 10 else [*names[:9], "and others"])


def _order(task: Task, saved: SavedModel) -> list[int]:
    """Return a model's outputs, those of the data's classes first and in their order.

    Outputs are found by name, and unnamed ones (``LABEL_0``) by number. Raises ``FedrotError``.
    """
    data, outputs = task.data, [name.strip().casefold() for name in saved.labels]
    classes = [str(name) for name in data.tags or data.label_names]
    wanted, count = [name.strip().casefold() for name in classes], len(outputs)
    several = data.kind == "multi" and task.experiment.task != "ner"
    alike = len({*wanted}) < len(wanted)
    if outputs == [f"label_{n}" for n in range(count)] and not {*wanted} <= {*outputs}:
        outputs = wanted if len(wanted) == count else [str(n) for n in range(count)]
    if data.kind == "regression" and count == 1:
        outputs = wanted
    if alike or any(outputs.count(n) != 1 for n in wanted) or (several and len(wanted) != count):
        raise FedrotError(
            f"The data has the {len(classes)} classes {_some(classes)}; the {count} outputs of "
            f"'{saved.name}' are {_some(saved.labels)}. Give data with these classes, or correct the "
            "models' id2label."
        )
    first = [outputs.index(name) for name in wanted]
    return first + [n for n in range(count) if n not in first]
