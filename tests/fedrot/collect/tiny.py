"""Tiny models, padded batches, and what their layers read, for the tests of
collectors.
"""

from functools import partial

import torch
import transformers
from torch import nn

from tests.fedrot.oracles import seeded
from tests.models import VOCABULARY

CONV1D = transformers.pytorch_utils.Conv1D

#: Settings of models of one layer, or of one layer that is run often.
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}


#: Settings that other families name otherwise.
OTHER = {
    "distilbert": {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12},
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "pad_token_id": 0},
}


def tiny_classifier(kind, task="SequenceClassification", **settings):
    """Return a small classifier of a ``model_type``."""
    config = transformers.AutoConfig.for_model(
        kind, **{**TINY, **OTHER.get(kind, {}), **settings}
    )
    return getattr(transformers, f"AutoModelFor{task}").from_config(config)


def batch_of(seed, rows=3, length=8, padding=3, vocabulary=VOCABULARY):
    """Return token sequences, the first one padded."""
    ids = torch.randint(4, vocabulary, (rows, length), generator=seeded(seed))
    mask = torch.ones_like(ids)
    mask[0, length - padding :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def of_text(name, batch):
    """Return the mask of the tokens that a module reads, ``attention_mask``; None if
    all count.
    """
    return batch.get("attention_mask")


def rows_of(model, batches, mask_of=of_text):
    """Return what every linear module reads and returns, float64 ``[tokens, units]``,
    from loops.
    """
    found = {}
    batch = {}

    def keep(name, _, args, kwargs, output):
        (given,) = (*args, *kwargs.values())
        mask = mask_of(name, batch)
        mask = None if mask is None else mask.flatten(0, -2)
        for rows, tensor in zip(
            found.setdefault(name, ([], [])), (given, output), strict=True
        ):
            for place, row in enumerate(tensor.double().clone()):
                if row.ndim == 1 or mask is None or tensor.shape[:2] != mask.shape:
                    rows.extend(row.reshape(-1, row.shape[-1]))
                else:
                    rows.extend(
                        one
                        for one, counts in zip(row, mask[place], strict=True)
                        if counts
                    )

    handles = [
        module.register_forward_hook(partial(keep, name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | CONV1D)
    ]
    model.eval()
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    return {
        name: (torch.stack(read), torch.stack(out))
        for name, (read, out) in found.items()
    }
