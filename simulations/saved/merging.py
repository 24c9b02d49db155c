"""Averages of saved models, which are compared and aligned, and of LoRA adapters."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrot._io import read_json, write_tensors
from fedrot.aggregation import Mean
from fedrot.alignment.anchors import finder
from fedrot.alignment.diagnosis import ALIGNED, PLAIN, WHOLE, diagnose
from fedrot.collect.activations import probing
from fedrot.errors import FedrotError
from fedrot.lora import AdapterOptions, AdapterUpdate, LoraSettings
from fedrot.lora.adapters import factors, pairs_of, plain_names
from fedrot.matching.anchor import Anchor
from fedrot.options import AlignmentOptions
from fedrot.simulations.data.read import listed
from fedrot.simulations.pretrained import loading, models_inside
from fedrot.simulations.saved.load import (
    SavedModel,
    about,
    load,
    tensors_of_base,
    writing,
)
from fedrot.simulations.saved.mean_change import MeanChange
from fedrot.simulations.scenario import Settings
from fedrot.symmetry import DEFAULT_PARTS, WHOLE_MODEL, Symmetry, symmetry_of
from fedrot.symmetry.canonical import canonical
from fedrot.symmetry.resolve import tied_tensors
from fedrot.tensors import Tensors, check_finite, check_update, widened

#: Values of ``--parts`` beside names of parts; choices of a diagnosis among them.
_NAMED = {"none": (), PLAIN: (), ALIGNED: DEFAULT_PARTS, WHOLE: WHOLE_MODEL}

#: Names of fields on which no output depends. ``label2id`` says what ``id2label`` says.
_HARMLESS = re.compile(
    r"_?name_or_path|(torch_)?dtype|transformers_version|tokenizer_class|(bos|cls|sep)_token_id"
    r"|label2id|problem_type|finetuning_task|task_specific_params|pretraining_tp|use_cache|return_dict"
    r"|output_(attentions|hidden_states)|gradient_checkpointing|chunk_size_feed_forward"
    r"|\w*drop\w*|init(ializer)?_(std|range|factor|cutoff_factor)"
    # Of adapters: what is in the scale of their products or in the names of their
    # tensors.
    r"|r|rank_pattern|lora_alpha|alpha_pattern|use_rslora|init_lora_weights|(eva|loftq|runtime)_config"
    r"|auto_mapping|inference_mode|peft_version|(target|exclude)_modules|layers_to_transform"
    r"|layers_pattern|modules_to_save"
)

#: Fields in which a base may differ from models that were fine-tuned from it.
_FREE_IN_BASE = ("architectures", "id2label", "pad_token_id")


def merge_models(
    names: list[str],
    out: Path | None,
    weights: list[float],
    allowed: list[str],
    parts: str | None,
    data: Settings,
    fit_head: bool,
    base_name: str | None,
) -> list[Any]:
    """Diagnose saved models, align them to the first, and write their mean.

    With a base they are aligned to it, and the data choose the scale of the mean change
    from it, see ``MeanChange``.

    Returns sentences about it, and a table. All models are held in memory. The mean is
    computed in float32 or float64 and has the dtypes, configuration and tokenizer of
    the first model. With data, the first sentence says whether it is better than the
    best of the models.

    Args:
        names: of two or more models that differ only in the values of tensors, see
            ``load``.
        out: a new or empty folder; None: nothing is written.
        weights: one for each model.
        allowed: fields of configurations that may differ.
        parts: see ``options_of``; None: what the diagnosis recommends.
        data: fields of an experiment that name the data; empty: the models are not
            evaluated.
        fit_head: whether the task head of the mean is fitted to the data's training
            rows.
        base_name: of the model from which all were fine-tuned, only with data; it may
            be of another class.
    """
    models = [load(name, whole=True) for name in names]
    first = models[0]
    for saved in models:
        _refuse_unlike(first, saved, allowed)
        with about(saved.name):
            check_finite(saved.tensors)
    base: Tensors = {}
    if base_name is not None:
        start = load(base_name)
        base = tensors_of_base(start, first)
        _refuse_unlike(first, start, [*allowed, *_FREE_IN_BASE])
    if data:  # Its modules need seconds for their imports.
        from fedrot.simulations.saved import judge

        judged = judge.prepared(first, data)
    symmetry = symmetry_of(first.model.config, first.tensors)
    ours = {**first.tensors, **base}
    updates = [saved.tensors for saved in models if base or saved is not first]
    diagnosis = diagnose(ours, updates, symmetry)
    options = options_of(parts or diagnosis.choice)
    if set(options.parts) == set(WHOLE_MODEL):
        options = options.movable(symmetry)
    options = options.for_model(symmetry)
    change, reports = _mean_change(models, weights, symmetry, options, ours, base)
    sentences = [
        f"Diagnosis: {diagnosis}",
        f"Aligned parts: {', '.join(options.parts) or 'none'}.",
        *reports,
    ]
    lacking = ours.keys() - base
    if base and lacking:
        sentences.append(
            f"The base lacks {listed(sorted(lacking))}: the mean's at every scale."
        )
    if data:
        merged, verdict = judge.verdict(judged, models, change, fit_head)
        sentences = [*verdict, *sentences]
    else:
        merged = change.at(1)
        sentences.append(
            "--data tells whether it is better than the best model; see also --base "
            "and --fit-head."
        )
    with about(f"the mean in the dtypes of {first.name} (save that in float32)"):
        check_finite(merged)
    if out is not None:
        # The mean has no names of tied tensors.
        first.model.load_state_dict(merged, strict=False)
        with writing(out) as folder:
            first.model.save_pretrained(folder)
            if first.tokenizer is not None:
                first.tokenizer.save_pretrained(folder)
    return sentences


def _mean_change(
    models: list[SavedModel],
    weights: list[float],
    symmetry: Symmetry,
    options: AlignmentOptions,
    ours: Tensors,
    base: Tensors,
) -> tuple[MeanChange, list[str]]:
    """Return the weighted mean of models that are aligned to ``ours``.

    This is the first model, with the tensors of a base if there is one. Reports of the
    alignments are returned, too.
    """
    first = models[0]
    evidence = None
    if options.rotates:
        symmetry = symmetry.rotated
    else:
        # Small batches: a language model's outputs have the width of its vocabulary.
        evidence = probing(
            first.build, first.model.config.to_dict(), symmetry, batch_size=64
        )
    find = finder(ours, symmetry, options, evidence=evidence)
    anchor = Anchor(ours)
    mean = Mean()
    reports = []
    for saved, weight in zip(models, weights, strict=True):
        moved = widened(saved.tensors)
        twins = {name for tied in tied_tensors(saved.tensors) for name in tied[1:]}
        with about(saved.name):
            if base or saved is not first:
                check_update(saved.tensors, symmetry.shapes)
                alignment = find(saved.tensors, anchor)
                moved = alignment.apply(moved)
                if options.parts:
                    reports.append(f"'{saved.name}': {alignment.report}")
            elif options.canonical:
                moved = canonical(moved, symmetry)
            # It refuses tables that are tied in one model only.
            mean.add(
                {name: tensor for name, tensor in moved.items() if name not in twins},
                weight,
            )
    if options.canonical:
        ours = canonical(ours, symmetry)
    start = {name: ours[name] for name in base}
    return MeanChange(mean.result(), start, first.tensors), reports


def options_of(parts: str) -> AlignmentOptions:
    """Return options for parts joined by ``+``, ``whole`` or ``none``.

    Raises ``FedrotError``.
    """
    return AlignmentOptions(_NAMED.get(parts, parts.split("+")))


def _refuse_unlike(
    first: SavedModel,
    other: SavedModel,
    allowed: Collection[str],
) -> None:
    """Raise ``FedrotError`` if two models differ in a field that is not allowed.

    Their configurations and tokenizers are compared, and of models of two classes the
    configurations of their bodies.
    """
    if "id2label" not in allowed and sorted(first.labels) == sorted(other.labels):
        for place, (here, there) in enumerate(
            zip(first.labels, other.labels, strict=True)
        ):
            if here != there:
                raise FedrotError(
                    "The task heads have the same classes in another order: output "
                    f"{place} is {here!r} in '{first.name}' and {there!r} in "
                    f"'{other.name}'. Reorder one head and its id2label; if only names "
                    "are in another order, give --allow id2label."
                )
    configs = []
    tokenized = all([first.tokenizer, other.tokenizer])
    alike = type(first.model) is type(other.model)
    for saved in (first, other):
        model = saved.model if alike else saved.model.base_model
        config = model.config.to_dict()
        if tokenized:
            config["tokenizer"] = {
                number: token for token, number in saved.tokenizer.get_vocab().items()
            }
        configs.append((saved.name, config))
    refuse_different(configs[0], configs[1], allowed)


def refuse_different(
    first: tuple[str, Any],
    other: tuple[str, Any],
    allowed: Collection[str],
) -> None:
    """Raise ``FedrotError`` if two named configurations differ in a field.

    Harmless fields and those that are allowed may differ.
    """
    first_name, settings = first
    other_name, other_settings = other
    fields = dict(_fields(settings))
    others = dict(_fields(other_settings))
    for field in dict.fromkeys((*fields, *others)):
        section, *_ = field.split(".")
        if field in allowed or section in allowed:
            continue
        here = fields.get(field)
        there = others.get(field)
        if here != there:
            raise FedrotError(
                f"Different configurations: {field} is {here!r} in '{first_name}' and "
                f"{there!r} in '{other_name}', and may change what the same weights "
                f"compute. If it does not, repeat the command with --allow {field}."
            )


def _fields(settings: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield by path the fields that are not harmless and not empty.

    Those of nested configurations are among them.
    """
    for key, value in settings.items():
        if _HARMLESS.fullmatch(str(key)):
            continue
        if isinstance(value, Mapping):
            yield from _fields(value, f"{path}{key}.")
        elif value is not None and value != []:
            yield f"{path}{key}", value


def merge_adapters(
    names: list[str],
    out: Path | None,
    weights: list[float],
    allowed: list[str],
    rank: int | None,
) -> list[str]:
    """Average the products of saved LoRA adapters of one base, and write an adapter.

    Ranks and alphas may differ. The configuration is that of the first adapter with
    another rank. Returns a sentence about the average.

    Args:
        names: two or more folders that PEFT's ``save_pretrained`` wrote.
        out, weights, allowed: as in ``merge_models``.
        rank: of the result; None: the largest rank of the adapters.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    adapters = [_load(name) for name in names]
    first = adapters[0].config
    rank = rank or max(adapter.rank for adapter in adapters)
    settings = adapters[0].settings
    average = AdapterOptions("exact").average(settings, rank=rank)
    reference = (names[0], _compared(first))
    for name, weight, adapter in zip(names, weights, adapters, strict=True):
        refuse_different(reference, (name, _compared(adapter.config)), allowed)
        with about(name):
            average.add(AdapterUpdate(adapter.tensors, weight, adapter.settings))
    merged, report = average.result()
    if out is not None:
        first.r = rank
        first.rank_pattern = {}
        first.lora_alpha = settings.alpha
        with writing(out) as folder:
            first.save_pretrained(folder)
            write_tensors(
                folder / SAFETENSORS_WEIGHTS_NAME,
                {name: tensor.contiguous() for name, tensor in merged.items()},
                {"format": "pt"},
            )
    return [f"{report}."]


@dataclass(frozen=True)
class _SavedAdapter:
    """A LoRA adapter: PEFT's configuration, fedrot's settings of it, and its tensors.

    ``rank`` is its largest.
    """

    config: Any
    settings: LoraSettings
    tensors: Tensors
    rank: int


def _load(name: str) -> _SavedAdapter:
    """Load an adapter; null fields of its configuration have PEFT's defaults."""
    import peft
    from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

    folder = Path(name)
    for files in ((CONFIG_NAME,), (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
        if not any((folder / file).is_file() for file in files):
            raise FedrotError(
                f"'{name}' has no {files[0]}. Give folders of LoRA adapters only."
                f"{models_inside(folder)}"
            )
    stored = {"peft_type": "LORA", **read_json(folder / CONFIG_NAME)}
    fields = {key: value for key, value in stored.items() if value is not None}
    with loading(name), about(name):
        config = peft.PeftConfig.from_peft_type(**fields)
        settings = LoraSettings.of(config)
        tensors = plain_names(peft.load_peft_weights(name, device="cpu"))
        rank = max(len(factors(tensors, pair)[0]) for pair in pairs_of(tensors))
    if settings.changed_base:
        raise FedrotError(
            f"'{name}' was initialised by {settings.changed_base}, which changes the "
            "base weights. Save it with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    return _SavedAdapter(config, settings, tensors, rank)


def _compared(config: Any) -> Settings:
    """Return the fields of a configuration, with the base written in one way.

    The base is a folder or a name on the hub.
    """
    fields = config.to_dict()
    base = fields["base_model_name_or_path"]
    if base:
        fields["base_model_name_or_path"] = os.path.relpath(os.path.realpath(base))
    if fields["revision"] == "main":
        fields["revision"] = None
    return fields
