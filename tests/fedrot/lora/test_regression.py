"""Regressed averages of adapters, against dense least squares in NumPy on the clients' inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedrot.aggregation.gram_sums import UNBOUNDED, Inverse
from fedrot.errors import FedrotError, UpdateError
from fedrot.lora import AdapterOptions, AdapterUpdate, LoraSettings, average_adapters
from fedrot.lora.gauges import GAUGES
from fedrot.lora.regression import nearest
from tests.fedrot.lora.test_averaging import (
    IN,
    MODULES,
    SETTINGS,
    Adapter,
    adapter,
    dense_mean,
    product,
    scrambled,
    truncated,
)
from tests.fedrot.oracles import Array

QUERY, HEAD = MODULES
SCALES = (SETTINGS, LoraSettings(alpha=2.0), LoraSettings(alpha=3.0, use_rslora=True))
EXACT = AdapterOptions("exact")


def regmean(alpha: float = 1.0, gauge: str = "keep-a") -> AdapterOptions:
    return AdapterOptions("regmean", gauge, alpha)


def factor(module: str) -> str:
    return f"{module}.lora_A.weight"


@dataclass(frozen=True)
class Client:
    """An adapter, and by module the inputs ``[rows, in]`` of its first factor."""

    tensors: Adapter
    weight: float
    settings: LoraSettings
    inputs: dict[str, Array]

    def update(self, form: Callable[[Tensor], Tensor] = lambda gram: gram) -> AdapterUpdate:
        grams = {factor(m): form(torch.tensor(x.T @ x / len(x))) for m, x in self.inputs.items()}
        return AdapterUpdate(self.tensors, self.weight, self.settings, {"gram": grams})


def clients(
    seed: int, ranks: Sequence[int] = (3, 3, 3), rows: int = 20, width: int = IN
) -> list[Client]:
    """Return clients whose inputs lie in a common space of a dimension of at most ``width``."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(width, IN))

    def inputs() -> Array:
        spread = np.diag(rng.uniform(0.1, 3.0, width))
        return np.asarray(rng.normal(size=(rows, width)) @ spread @ common)

    return [
        Client(adapter(seed + n, rank), n + 1.0, SCALES[n % 3], {m: inputs() for m in MODULES})
        for n, rank in enumerate(ranks)
    ]


def averaged(sent: Sequence[Client], options: AdapterOptions, **given: Any) -> Adapter:
    return average_adapters([c.update() for c in sent], SETTINGS, options, **given)[0]


def rows_of(sent: Sequence[Client], module: str, alpha: float) -> tuple[Array, Array]:
    """Return rows and targets whose squared errors add up to the objective (Jin et al., Appendix A)."""
    left, right = [], []
    for one in sent:
        x = one.inputs[module]
        dense = product(one.tensors, module, one.settings).numpy()
        diagonal = np.diag(np.sqrt(np.diag(x.T @ x)))
        for rows, share in ((x, alpha), (diagonal, 1 - alpha)):
            root = np.sqrt(one.weight * share / len(x))
            left.append(root * rows)
            right.append(root * rows @ dense.T)
    return np.concatenate(left), np.concatenate(right)


def best(sent: Sequence[Client], module: str, alpha: float, rank: int) -> Array:
    """Return the least squares solution, cut to a rank by the root of the metric and its inverse."""
    rows, targets = rows_of(sent, module, alpha)
    whole = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    values, vectors = np.linalg.eigh(rows.T @ rows)
    roots = np.sqrt(values)
    u, s, vt = np.linalg.svd(whole @ (vectors * roots) @ vectors.T, full_matrices=False)
    return np.asarray((u[:, :rank] * s[:rank]) @ vt[:rank] @ (vectors / roots) @ vectors.T)


def close(found: Adapter, module: str, expected: Array | Tensor, tolerance: float = 1e-6) -> None:
    wanted = torch.as_tensor(expected)
    apart = torch.linalg.norm(product(found, module) - wanted)
    assert float(apart) <= tolerance * max(1.0, float(torch.linalg.norm(wanted)))


# The formula


@pytest.mark.parametrize("gauge", GAUGES)
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    alpha=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    ranks=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    rank=st.integers(1, 6),
)
def test_it_is_dense_least_squares_cut_in_the_metric(
    gauge: str, seed: int, alpha: float, ranks: list[int], rank: int
) -> None:
    sent = clients(seed, ranks)
    found = averaged(sent, regmean(alpha, gauge), rank=rank)
    for module in MODULES:
        close(found, module, best(sent, module, alpha, rank))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), alpha=st.sampled_from([0.0, 0.9, 1.0]))
def test_no_product_of_the_rank_near_by_has_a_smaller_error(seed: int, alpha: float) -> None:
    sent = clients(seed, (3, 2, 4))
    found = averaged(sent, regmean(alpha), rank=2)
    generator = torch.Generator().manual_seed(seed)
    rows, targets = (torch.tensor(values) for values in rows_of(sent, QUERY, alpha))

    def error(tensors: Adapter) -> float:
        return float(torch.linalg.norm(rows @ product(tensors, QUERY).mT - targets))

    least = error(found)
    assert least < error(averaged(sent, EXACT, rank=2))
    for size in (1e-1, 1e-3):
        noise = {n: torch.randn(t.shape, generator=generator).double() for n, t in found.items()}
        assert least < error({n: t + size * noise[n] for n, t in found.items()})


def test_one_client_comes_back_as_it_is() -> None:
    (one,) = clients(3, (2,))
    found = averaged([one], regmean(0.9))
    for module in MODULES:
        close(found, module, product(one.tensors, module, one.settings))
    first = clients(4, (2,))[0]
    alike = replace(first, settings=SETTINGS)
    again = averaged([alike, replace(alike, inputs=one.inputs)], regmean(0.9))
    for name, tensor in again.items():
        torch.testing.assert_close(tensor, first.tensors[name], atol=1e-7, rtol=0)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), alpha=st.sampled_from([0.0, 0.9, 1.0]))
def test_equal_gram_matrices_give_exact_if_nothing_is_cut(seed: int, alpha: float) -> None:
    sent = clients(seed, (1, 2, 3))
    alike = [replace(one, inputs=sent[0].inputs) for one in sent]
    found, expected = (averaged(alike, options, rank=6) for options in (regmean(alpha), EXACT))
    for module in MODULES:
        close(found, module, product(expected, module))


def test_inputs_without_a_preferred_direction_give_exact_at_every_rank() -> None:
    inputs = {module: np.eye(IN) for module in MODULES}
    sent = [replace(one, inputs=inputs) for one in clients(5)]
    for rank in (1, 2, 3, 5):
        found, expected = (averaged(sent, options, rank=rank) for options in (regmean(), EXACT))
        for module in MODULES:
            close(found, module, product(expected, module))


def test_the_product_depends_neither_on_coordinates_nor_on_the_order() -> None:
    sent = clients(6)
    found = averaged(sent, regmean(0.9))
    turned = [replace(one, tensors=scrambled(one.tensors, n)) for n, one in enumerate(sent)]
    for other in (turned, sent[::-1]):
        again = averaged(other, regmean(0.9), rank=3)
        for module in MODULES:
            close(again, module, product(found, module))


def test_other_tensors_are_averaged() -> None:
    sent = clients(7)
    name = "base_model.model.head.bias"
    expected = sum(one.weight * one.tensors[name] for one in sent) / sum(one.weight for one in sent)
    torch.testing.assert_close(averaged(sent, regmean())[name], expected)


def test_many_clients_are_summed_without_a_loss() -> None:
    sent = clients(8, (3,) * 40)
    for module in MODULES:
        close(averaged(sent, regmean(0.9)), module, best(sent, module, 0.9, 3))


def test_tensors_with_one_matrix_are_as_with_a_matrix_each() -> None:
    one, two = clients(9, (3, 2))
    alike = [replace(c, inputs=dict.fromkeys(MODULES, c.inputs[QUERY])) for c in (one, two)]
    shared = []
    for client in alike:
        update = client.update()
        gram = dict.fromkeys(update.statistics["gram"], update.statistics["gram"][factor(QUERY)])
        shared.append(replace(update, statistics={"gram": gram}))
    found, _ = average_adapters(shared, SETTINGS, regmean(0.9))
    expected = averaged(alike, regmean(0.9))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_dtypes_are_those_of_the_clients() -> None:
    sent = clients(11)
    updates = []
    for one in sent:
        update = one.update(Tensor.float)
        tensors = {name: tensor.float() for name, tensor in update.tensors.items()}
        updates.append(replace(update, tensors=tensors))
    found, _ = average_adapters(updates, SETTINGS, regmean(0.9))
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    for module in MODULES:
        close({n: t.double() for n, t in found.items()}, module, best(sent, module, 0.9, 3), 1e-5)


# Directions without evidence


def unseen_projection(sent: Sequence[Client], module: str) -> Tensor:
    """Return the orthogonal projection to the directions that no client's inputs have."""
    rows = torch.tensor(np.concatenate([one.inputs[module] for one in sent]))
    return torch.eye(IN, dtype=torch.float64) - torch.linalg.pinv(rows, rtol=1e-9) @ rows


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), width=st.integers(1, IN - 1))
def test_unseen_directions_keep_the_mean_product(seed: int, width: int) -> None:
    sent = clients(seed, (2, 3, 1), width=width)
    updates = [one.update() for one in sent]
    found, report = average_adapters(updates, SETTINGS, regmean(), rank=IN)
    for module in MODULES:
        null = unseen_projection(sent, module)
        assert round(float(null.trace())) == IN - width
        ours, mean = product(found, module), dense_mean(updates, module)
        assert torch.allclose(ours @ null, mean @ null, atol=1e-6)
        rows, targets = (torch.tensor(values) for values in rows_of(sent, module, 1.0))
        seen = torch.linalg.lstsq(rows, targets, driver="gelsd", rcond=1e-9).solution.mT
        assert torch.allclose(rows @ ours.mT, rows @ seen.mT, atol=1e-6)
        assert report.notes[module].startswith(f"{IN - width} of {IN} directions of its input")


@pytest.mark.parametrize("gauge", GAUGES)
def test_without_evidence_it_is_exact(gauge: str) -> None:
    nothing = {module: np.zeros((4, IN)) for module in MODULES}
    sent = [replace(one, inputs=nothing) for one in clients(12)]
    found = averaged(sent, regmean(0.9, gauge))
    for module in MODULES:
        close(found, module, truncated(dense_mean([one.update() for one in sent], module), 3))


def test_ranks_beyond_the_evidence_go_to_the_largest_part_of_the_rest() -> None:
    """Inputs of one dimension leave all but one rank to the mean product."""
    sent = clients(13, width=1)
    updates = [one.update() for one in sent]
    found, _ = average_adapters(updates, SETTINGS, regmean(), rank=3)
    whole, _ = average_adapters(updates, SETTINGS, regmean(), rank=IN)
    dense, null = product(whole, QUERY), unseen_projection(sent, QUERY)
    seen = dense @ (torch.eye(IN) - null)
    column = torch.linalg.svd(seen)[0][:, :1]
    first = column @ column.mT @ dense
    close(found, QUERY, first + truncated(dense - first, 2))


def test_units_that_are_always_zero_keep_the_mean_product() -> None:
    dead = [0, 4]
    sent = []
    for one in clients(14):
        inputs = {module: x.copy() for module, x in one.inputs.items()}
        for x in inputs.values():
            x[:, dead] = 0
        sent.append(replace(one, inputs=inputs))
    updates = [one.update() for one in sent]
    found, report = average_adapters(updates, SETTINGS, regmean(0.9), rank=IN)
    for module in MODULES:
        mean = dense_mean(updates, module)
        assert torch.allclose(product(found, module)[:, dead], mean[:, dead], atol=1e-8)
        assert report.notes[module].startswith(f"2 of {IN} directions")


def test_a_solution_without_bound_is_the_mean_product() -> None:
    """Two inputs that are nearly the same and contradict each other."""
    near = torch.zeros(IN, dtype=torch.float64)
    near[0] = 1.0
    grams = []
    for step in (0.0, 1e-5):
        near[1] = step
        grams.append(torch.outer(near, near))
    sent = clients(15, (3, 3))
    updates = [one.update(lambda _, g=g: g) for one, g in zip(sent, grams, strict=True)]
    found, report = average_adapters(updates, SETTINGS, regmean())
    assert report.notes == dict.fromkeys(MODULES, UNBOUNDED)
    for module in MODULES:
        close(found, module, truncated(dense_mean(updates, module), 3))


def test_products_of_zero_stay_zero() -> None:
    sent = []
    for one in clients(16):
        empty = {n: 0 * t if "lora_B" in n else t for n, t in one.tensors.items()}
        sent.append(replace(one, tensors=empty))
    found = averaged(sent, regmean(0.9))
    for module in MODULES:
        assert not product(found, module).any()
        assert found[factor(module)].any()


# Modules without Gram matrices, and errors


def test_modules_without_matrices_at_all_clients_get_the_mean_product() -> None:
    sent = [replace(one, inputs={QUERY: one.inputs[QUERY]}) for one in clients(17)]
    updates = []
    for n, one in enumerate(sent):
        generator = torch.Generator().manual_seed(n)
        more = {
            "m.table.lora_embedding_A": torch.randn(3, 11, generator=generator).double(),
            "m.table.lora_embedding_B": torch.randn(5, 3, generator=generator).double(),
            "m.conv.lora_A.weight": torch.randn(3, 2, 2, 2, generator=generator).double(),
            "m.conv.lora_B.weight": torch.randn(4, 3, 1, 1, generator=generator).double(),
        }
        updates.append(replace(one.update(), tensors={**one.tensors, **more}))
    found, _ = average_adapters(updates, SETTINGS, regmean(0.9))
    without = [replace(update, statistics={}) for update in updates]
    expected, _ = average_adapters(without, SETTINGS, EXACT)
    for name in expected:
        same = torch.equal(found[name], expected[name])
        assert same == (QUERY not in name)
    close(found, QUERY, best(sent, QUERY, 0.9, 3))


def lacking(update: AdapterUpdate) -> AdapterUpdate:
    return replace(update, statistics={})


def diagonal(update: AdapterUpdate) -> AdapterUpdate:
    grams = {name: gram.diagonal() for name, gram in update.statistics["gram"].items()}
    return replace(update, statistics={"gram": grams})


def of_second_factor(update: AdapterUpdate) -> AdapterUpdate:
    grams = {**update.statistics["gram"], f"{QUERY}.lora_B.weight": torch.eye(3).double()}
    return replace(update, statistics={"gram": grams})


def negative(update: AdapterUpdate) -> AdapterUpdate:
    return replace(
        update, statistics={"gram": {**update.statistics["gram"], factor(QUERY): -torch.eye(IN)}}
    )


def with_magnitudes(update: AdapterUpdate) -> AdapterUpdate:
    more = {f"{QUERY}.lora_magnitude_vector": torch.ones(7).double()}
    return replace(update, tensors={**update.tensors, **more})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lacking, "The update has no Gram matrices, which RegMean needs; see fedrot.collect_gram"),
        (diagonal, r"have shape \[\d+\], but the layer reads \d+ inputs"),
        (of_second_factor, "lora_B.weight' belongs to no lora_A of a linear layer"),
        (negative, "have negative eigenvalues"),
        (with_magnitudes, "has DoRA's magnitudes .* method 'regmean' is for products of LoRA alone"),
    ],
)
def test_what_one_client_sends_wrong_is_refused_and_not_added(
    change: Callable[[AdapterUpdate], AdapterUpdate], said: str
) -> None:
    first, second, wrong = (one.update() for one in clients(18))
    average = regmean(0.9).average(SETTINGS)
    average.add(first)
    with pytest.raises(UpdateError, match=said):
        average.add(change(wrong))
    average.add(second)
    found, report = average.result()
    expected, _ = average_adapters([first, second], SETTINGS, regmean(0.9))
    assert report.updates == 2
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(("weight", "most"), [(1.5, True), (2.5, False)])
def test_a_module_needs_gram_matrices_from_most_of_the_weight(weight: float, most: bool) -> None:
    """Clients without a module's Gram matrix are left out of it; if they are most, it is the mean."""
    sent = [one.update() for one in clients(20)]
    sent = [replace(one, weight=w) for one, w in zip(sent, (1.0, 1.0, weight), strict=True)]
    head = {factor(HEAD): sent[2].statistics["gram"][factor(HEAD)]}
    sent[2] = replace(sent[2], statistics={"gram": head})
    found, report = average_adapters(sent, SETTINGS, regmean(0.9))
    kept, method = (sent[:2], regmean(0.9)) if most else (sent, EXACT)
    expected, _ = average_adapters(kept, SETTINGS, method)
    close(found, QUERY, product(expected, QUERY))
    assert ("left out" if most else "mean") in report.notes[QUERY]


def test_the_result_may_be_read_twice() -> None:
    average = regmean(0.9).average(SETTINGS)
    for one in clients(19):
        average.add(one.update())
    (first, _), (second, _) = average.result(), average.result()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"method": "exact", "regmean_alpha": 0.5},
            "regmean_alpha is an option of 'regmean', and has no",
        ),
        (
            {"method": "regmean", "regmean_alpha": 1.5},
            "regmean_alpha is 1.5; it must be a number from 0 to 1",
        ),
        ({"method": "regmean", "regmean_alpha": "big"}, "regmean_alpha is 'big'; it must be a number"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FedrotError, match=said):
        AdapterOptions(**options)


def test_options_are_printed() -> None:
    assert str(AdapterOptions("regmean")) == "regmean, gauge 'keep-a', alpha 0.9"


# The parts


def test_a_cut_in_the_metric_needs_no_small_matrix() -> None:
    """More terms than inputs or outputs."""
    generator = torch.Generator().manual_seed(0)
    left, right, x = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((4, 11), (11, 6), (20, 6))
    )
    gram = x.mT @ x
    found = nearest(left, right, Inverse(gram, 1e-16), 2)
    values, vectors = torch.linalg.eigh(gram)
    root = vectors * values.sqrt() @ vectors.mT
    expected = truncated(left @ right @ root, 2) @ torch.linalg.inv(root)
    assert torch.allclose((found.u * found.s) @ found.vt, expected, atol=1e-9)
