"""Method ``regmean``: directions and modules without evidence, and the cut in the inputs' metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedrot.aggregation.gram_sums import UNBOUNDED, Inverse
from fedrot.lora import AdapterOptions, average_adapters
from fedrot.lora.regression import nearest
from tests.fedrot.lora.test_averaging import (
    EXACT,
    HEAD,
    IN,
    MODULES,
    QUERY,
    SETTINGS,
    Client,
    averaged,
    clients,
    close,
    dense_mean,
    drawing,
    factor,
    product,
    regressed,
    rows_of,
    truncated,
)

REGMEAN = AdapterOptions("regmean")
UNSHRUNK = AdapterOptions("regmean", regmean_alpha=1.0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [2, 40])
def test_alpha_shrinks_what_any_number_of_clients_sends(alpha: float, count: int) -> None:
    sent = clients(8, (3,) * count)
    found = averaged(sent, AdapterOptions("regmean", regmean_alpha=alpha))
    for module in MODULES:
        close(found, module, regressed(sent, module, 3, alpha))


def unseen_projection(sent: Sequence[Client], module: str) -> Tensor:
    """Return the orthogonal projection to the directions that no client's inputs have."""
    rows = torch.tensor(np.concatenate([one.inputs[module] for one in sent]))
    return torch.eye(IN, dtype=torch.float64) - torch.linalg.pinv(rows, rtol=1e-9) @ rows


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000), width=st.integers(1, IN - 1))
def test_unseen_directions_keep_the_mean_product(seed: int, width: int) -> None:
    sent = clients(seed, (2, 3, 1), width=width)
    updates = [one.update() for one in sent]
    found, report = average_adapters(updates, SETTINGS, UNSHRUNK, rank=IN)
    for module in MODULES:
        null = unseen_projection(sent, module)
        ours, mean = product(found, module), dense_mean(updates, module)
        assert torch.allclose(ours @ null, mean @ null, atol=1e-6)
        rows, targets = (torch.tensor(values) for values in rows_of(sent, module, 1.0))
        seen = torch.linalg.lstsq(rows, targets, driver="gelsd", rcond=1e-9).solution.mT
        assert torch.allclose(rows @ ours.mT, rows @ seen.mT, atol=1e-6)
        assert report.notes[module].startswith(f"{IN - width} of {IN} directions of its input")


def test_ranks_beyond_the_evidence_go_to_the_largest_part_of_the_rest() -> None:
    """Inputs of one dimension leave all but one rank to the mean product."""
    sent = clients(13, width=1)
    whole = averaged(sent, UNSHRUNK, rank=IN)
    dense, null = product(whole, QUERY), unseen_projection(sent, QUERY)
    column = torch.linalg.svd(dense @ (torch.eye(IN) - null))[0][:, :1]
    first = column @ column.mT @ dense
    close(averaged(sent, UNSHRUNK, rank=3), QUERY, first + truncated(dense - first, 2))


def test_without_evidence_or_a_bounded_solution_it_is_exact() -> None:
    """Inputs that are 0; and two inputs that are nearly the same and contradict each other."""
    near = [torch.zeros(IN).double() for _ in range(2)]
    near[0][0] = near[1][0] = 1.0
    near[1][1] = 1e-5
    for grams in ([torch.zeros(IN, IN).double()] * 2, [torch.outer(x, x) for x in near]):
        sent = clients(15, (3, 3))
        updates = [one.update(lambda _, g=g: g) for one, g in zip(sent, grams, strict=True)]
        found, report = average_adapters(updates, SETTINGS, REGMEAN)
        assert (set(report.notes.values()) == {UNBOUNDED}) == bool(grams[0].any())
        for module in MODULES:
            close(found, module, truncated(dense_mean(updates, module), 3))


def test_products_of_zero_stay_zero() -> None:
    sent = []
    for one in clients(16):
        empty = {n: 0 * t if "lora_B" in n else t for n, t in one.tensors.items()}
        sent.append(replace(one, tensors=empty))
    found = averaged(sent, REGMEAN)
    for module in MODULES:
        assert not product(found, module).any()
        assert found[factor(module)].any()


def test_modules_without_matrices_at_all_clients_get_the_mean_product() -> None:
    sent = [replace(one, inputs={QUERY: one.inputs[QUERY]}) for one in clients(17)]
    updates = []
    for n, one in enumerate(sent):
        drawn = drawing(n)
        more = {
            "m.table.lora_embedding_A": drawn(3, 11),
            "m.table.lora_embedding_B": drawn(5, 3),
            "m.conv.lora_A.weight": drawn(3, 2, 2, 2),
            "m.conv.lora_B.weight": drawn(4, 3, 1, 1),
        }
        updates.append(replace(one.update(), tensors={**one.tensors, **more}))
    found, _ = average_adapters(updates, SETTINGS, REGMEAN)
    without = [replace(update, statistics={}) for update in updates]
    expected, _ = average_adapters(without, SETTINGS, EXACT)
    for name in expected:
        assert torch.equal(found[name], expected[name]) == (QUERY not in name)
    close(found, QUERY, regressed(sent, QUERY, 3))


@pytest.mark.parametrize(("weight", "most"), [(1.5, True), (2.5, False)])
def test_a_module_needs_gram_matrices_from_most_of_the_weight(weight: float, most: bool) -> None:
    """Clients without a module's Gram matrix are left out of it; if they are most, it is the mean."""
    sent = [one.update() for one in clients(20)]
    sent = [replace(one, weight=w) for one, w in zip(sent, (1.0, 1.0, weight), strict=True)]
    head = {factor(HEAD): sent[2].statistics["gram"][factor(HEAD)]}
    sent[2] = replace(sent[2], statistics={"gram": head})
    found, report = average_adapters(sent, SETTINGS, REGMEAN)
    kept, method = (sent[:2], REGMEAN) if most else (sent, EXACT)
    expected, _ = average_adapters(kept, SETTINGS, method)
    close(found, QUERY, product(expected, QUERY))
    assert ("left out" if most else "mean") in report.notes[QUERY]


def test_a_cut_in_the_metric_needs_no_small_matrix() -> None:
    """More terms than inputs or outputs."""
    drawn = drawing(0)
    left, right, x = (drawn(*shape) for shape in ((4, 11), (11, 6), (20, 6)))
    gram = x.mT @ x
    found = nearest(left, right, Inverse(gram, 1e-16), 2)
    values, vectors = torch.linalg.eigh(gram)
    root = vectors * values.sqrt() @ vectors.mT
    expected = truncated(left @ right @ root, 2) @ torch.linalg.inv(root)
    assert torch.allclose((found.u * found.s) @ found.vt, expected, atol=1e-9)
