"""Small LLaMAs that were trained from different starts on texts of their own."""

from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=10,
    hidden_size=24,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=16,
    tie_word_embeddings=False,
)


def build():
    return LlamaForCausalLM(CONFIG)


def rows(seed, count):
    """Return texts in which each token follows from the two before it, but for one in
    five.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(10, (16, 12), generator=generator)
        for place in range(2, 12):
            follows = (7 * ids[:, place - 1] + 3 * ids[:, place - 2]) % 10
            noise = torch.rand(16, generator=generator) < 0.2
            ids[:, place] = torch.where(noise, ids[:, place], follows)
        yield {"input_ids": ids, "labels": ids}


@cache
def trained(seed):
    """Return a model that was trained from a start of its own on rows of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batch in rows(seed, 300):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {
        name: tensor.detach().clone() for name, tensor in model.state_dict().items()
    }


def loss(tensors):
    """Return the loss on rows that nobody has seen."""
    model = build().eval()
    model.load_state_dict(tensors)
    with torch.no_grad():
        return float(sum(model(**batch).loss for batch in rows(99, 8)) / 8)
