"""Models of single sites, and what they are worth on each site's own rows.

A site's own test rows are drawn from the test set in the proportions of its rows. Here
each test row has its expected weight in place of a draw, which has no noise of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas
import torch
from pandas import DataFrame
from torch import Tensor
from torch.nn import functional

from fedrot.errors import UpdateError
from fedrot.task_head.choice import REFERENCE, SHRINKAGES
from fedrot.task_head.fit import fitted_task_heads
from fedrot.task_head.losses import TEMPERATURES
from fedrot.task_head.site_head import site_shift
from fedrot.task_head.sums import ClassSums
from reproductions.heads import closed
from reproductions.heads.arms import ARMS, Arm
from reproductions.heads.cell import CLIENTS, Array, Cell
from reproductions.heads.federation import Federation, Model, epoch
from reproductions.heads.rounds import clients_of, play_all

#: Learning rates of the sites' own arms, chosen from up to four by accuracy on own rows
#: of dair_emotion, Dirichlet 0.3, seed 10.
RATES = {"alone": 2e-4, "finetuning": 1e-4, "fedrep": 5e-4, "pfedfda": 2e-4}
#: FedRep: epochs of a site's head in a round, and their rate.
HEAD_EPOCHS, HEAD_RATE = 5, 1e-2
#: Epochs of local fine-tuning among which a site's held-out rows choose.
FINETUNED = (0, 1, 2)
#: pFedFDA: shares of a site's own means and covariance in its mixture.
MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Of a head that is refined on own rows: the pull to the head of all clients.
PULL = 3.0
STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)
#: Arms without any training.
UNTRAINED = ("constant", "alone-head", "step0")
#: All arms, in the order in which they are computed.
SITE_ARMS = (
    *UNTRAINED,
    "alone",
    "fedavg",
    "fedavg+fit",
    "fedavg+finetuning",
    "fedrep",
    "pfedfda",
    "ours-lowest",
    "ours+finetuning",
)

#: What a site can do without the priors of fedrot.
PERSONAL = ("alone-head", "alone", "fedavg+finetuning", "fedrep", "pfedfda")

#: Logits of the models of all sites at the test rows, ``[sites, rows, classes]``, by
#: the name of an arm.
Answers = Iterator[tuple[str, Tensor]]


@dataclass(eq=False)
class Sites:
    """The sites of a federation.

    Attributes:
        federation: of a cell.
        rounds: of the arms that train.
        rates: in place of ``RATES``.
    """

    federation: Federation
    rounds: int
    rates: Mapping[str, float]

    def read(self, flat: Tensor, rows: Array) -> Tensor:
        """Return the features of rows; all rows are read at once, and kept."""
        body = flat[: -self.federation.size]
        last, features = vars(self).get("_read", (body[:0], body))
        if not torch.equal(last, body):
            every = np.arange(len(self.federation.labels))
            features = self.federation.features(flat, every)
            vars(self)["_read"] = body, features
        return features[rows]

    @property
    def cell(self) -> Cell:
        """The cell of the federation."""
        return self.federation.cell

    def own(self, rows: Array, site: int) -> Array:
        """Return those of some rows that a site has."""
        return rows[self.cell.client[rows] == site]

    def epochs(self, site: int) -> Array:
        """Return a site's training rows in the order of all rounds."""
        orders = [self.cell.batches(n)[site] for n in range(1, self.rounds + 1)]
        return np.concatenate(orders)

    def answers(self, arms: Sequence[str]) -> Answers:
        """Yield the logits of arms, and of their variants, at the test rows."""
        makers: dict[str, Callable[[], Answers]] = {
            "constant": self.constant,
            "alone-head": self.alone_heads,
            "step0": partial(self.global_heads, "step0"),
            "alone": self.alone,
            "fedavg": partial(self.global_heads, "fedavg"),
            "fedavg+fit": partial(self.global_heads, "fedavg+fit"),
            "fedavg+finetuning": partial(self.finetuned, "fedavg"),
            "fedrep": self.fedrep,
            "pfedfda": self.pfedfda,
            "ours-lowest": partial(self.global_heads, "ours-lowest"),
            "ours+finetuning": partial(self.finetuned, "ours-lowest"),
        }
        for arm in arms:
            yield from makers[arm]()

    # One model of all sites

    def played(self, name: str) -> Model:
        """Return the last model of an arm of ``arms.py``; it is computed once."""
        kept: dict[str, Model] = vars(self).setdefault("_played", {})
        if name not in kept and name == "fedavg+fit":  # the same rounds
            flat = self.played("fedavg").flat
            kept[name] = self.federation.evaluate(flat, ARMS[name].head)
        elif name not in kept:
            kept[name] = play_all(self.federation, ARMS[name], self.rounds)
        return kept[name]

    def counts(self, name: str) -> Tensor:
        """Return the rows by class behind the head of an arm: of sums or of rounds."""
        every = torch.from_numpy(self.cell.counts).double()
        if ARMS[name].fit != "never" or ARMS[name].start:
            return every.sum(0)
        trained = [clients_of(self.cell, n) for n in range(1, self.rounds + 1)]
        return sum((every[clients].sum(0) for clients in trained), every[0] * 0)

    def shifts(self, name: str, strength: float = 1.0) -> Tensor:
        """Return what each site adds to the logits of an arm, ``[sites, classes]``."""
        counts = self.counts(name)
        priors = torch.where(counts > 0, counts, 0.5) / counts.sum()
        own = [torch.from_numpy(counts) for counts in self.cell.counts]
        return torch.stack([site_shift(priors, n, strength=strength) for n in own])

    def global_heads(self, name: str) -> Answers:
        """Yield one model of all sites, with the priors of all and with those of each
        site; without training also for other strengths, a mixture and a refined head.
        """
        model = self.played(name)
        features = self.read(model.flat, self.cell.test)
        logits = closed.scores(features, model.head).expand(CLIENTS, -1, -1)
        yield name, logits
        yield f"{name}/own", logits + self.shifts(name)[:, None]
        if name == "step0":
            for strength in STRENGTHS:
                shifts = self.shifts(name, strength)[:, None]
                yield f"{name}/own:{strength:g}", logits + shifts
        if name in ("step0", "ours-lowest"):
            yield f"{name}/mixture", self.mixtures(model.flat, features)
            yield f"{name}/refined", self.refined(name, model, features)

    def mixtures(self, flat: Tensor, features: Tensor) -> Tensor:
        """Return the logits of pFedFDA's heads for a body; no round is trained."""
        heads = self.mixed_heads(flat)
        return torch.stack([closed.scores(features, head) for head in heads])

    def refined(self, name: str, model: Model, features: Tensor) -> Tensor:
        """Return the logits of heads that are refined on own rows.

        Logistic regression on a site's training rows, with ``PULL / 2 * mean |h|^2``
        times the squared change of the head added to the sum of losses.
        """
        answers = []
        weight, bias = (part.double() for part in model.head)
        for site, shift in enumerate(self.shifts(name)):
            rows = self.own(self.cell.training, site)
            own = self.read(model.flat, rows).double()
            labels = self.federation.labels[rows]
            pull = PULL / 2 * own.square().sum(1).mean()
            inputs = functional.pad(own, (0, 1), value=1.0)
            head = torch.cat([weight, (bias + shift)[:, None]], 1)
            change = _fitted_change(inputs, labels, head, float(pull))
            both = functional.pad(features.double(), (0, 1), value=1.0)
            answers.append(both @ (head + change).mT)
        return torch.stack(answers)

    # Models of single sites

    def constant(self) -> Answers:
        """Yield the shares of a site's classes, the same for every row."""
        shares = torch.stack([self.smoothed(site) for site in range(CLIENTS)]).log()
        yield "constant", shares[:, None].expand(-1, len(self.cell.test), -1)

    def smoothed(self, site: int) -> Tensor:
        """Return the shares of a site's classes, with one row of equal shares more."""
        counts = torch.from_numpy(self.cell.counts[site]).double()
        return (counts + 1 / len(counts)) / (counts.sum() + 1)

    def alone_heads(self) -> Answers:
        """Yield heads that are fitted to a site's own sums, with the first body."""
        federation, flat = self.federation, self.federation.start
        test = self.read(flat, self.cell.test)
        answers = []
        for site in range(CLIENTS):
            rows = self.own(self.cell.training, site)
            features = self.read(flat, rows)
            labels = federation.labels[rows]
            total = closed.sums_of(features, labels, self.cell.classes)
            try:
                heads = fitted_task_heads(total, SHRINKAGES)
                head = self.chosen(flat, site, heads)
                answers.append(closed.scores(test, head))
            except UpdateError:  # one class
                shares = self.smoothed(site).log()
                answers.append(shares.expand(len(test), -1))
        yield "alone-head", torch.stack(answers)

    def chosen(self, flat: Tensor, site: int, heads: closed.Head) -> closed.Head:
        """Return the best of fitted heads and temperature by a site's held-out rows."""
        held = self.own(self.cell.held_out, site)
        if not len(held):
            place = SHRINKAGES.index(REFERENCE)
            return heads[0][place], heads[1][place]
        features = self.read(flat, held)
        labels = self.federation.labels[held]
        return closed.calibrated(features, labels, heads, TEMPERATURES)[0]

    def alone(self) -> Answers:
        """Yield models that a site trains alone, for an epoch a round."""
        arm = Arm(self.rates["alone"])
        ends = []
        for site in range(CLIENTS):
            start = self.federation.start
            ends.append(self.trained(start, self.epochs(site), arm))
        yield "alone", self.logits(ends)

    def trained(self, flat: Tensor, rows: Array, arm: Arm) -> Tensor:
        """Return flat parameters after training on rows in this order."""
        return epoch(self.federation.loss, flat, rows, arm)[0]

    def finetuned(self, name: str) -> Answers:
        """Yield the model of an arm, trained further at each site; its held-out rows
        choose for how many epochs.
        """
        federation, model = self.federation, self.played(name)
        arm = Arm(self.rates["finetuning"])
        shifts = self.shifts(name).float()
        orders = [self.cell.batches(self.rounds + n) for n in FINETUNED]
        ends = []
        for site in range(CLIENTS):
            held = self.own(self.cell.held_out, site)
            flat = self.with_head(model)
            if name != "fedavg":  # with the priors of the site
                size = self.cell.classes
                flat[-size:] += shifts[site]
            tried = [flat]
            for order in orders[1:]:
                tried.append(self.trained(tried[-1], order[site], arm))
            losses = [0.0] * len(tried)
            if len(held):
                with torch.no_grad():
                    losses = [float(federation.loss(end, held)) for end in tried]
            ends.append(tried[int(np.argmin(losses))])
        yield f"{name.removesuffix('-lowest')}+finetuning", self.logits(ends)

    def with_head(self, model: Model) -> Tensor:
        """Return flat parameters with the head of a model at its best temperature."""
        head = [part.flatten().float() for part in model.head]
        return torch.cat([model.flat[: -self.federation.size], *head])

    def fedrep(self) -> Answers:
        """Yield FedRep (Collins et al., ICML 2021): one body, a head for each site.

        In a round a site trains its head for ``HEAD_EPOCHS``, then the body for an
        epoch. After the last round every site trains its head.
        """
        federation, arm = self.federation, Arm(self.rates["fedrep"])
        size = federation.size
        body = federation.start[:-size]
        heads = [federation.start[-size:]] * CLIENTS
        for number in range(1, self.rounds + 1):
            ends, clients = [], clients_of(self.cell, number)
            for site in clients:
                heads[site] = self.fitted_by_steps(body, heads[site], site, number)
                rows = self.cell.batches(number)[site]
                ends.append(self.body_trained(body, heads[site], rows, arm))
            body = federation.mean(ends, clients)
        ends = []
        for site in range(CLIENTS):
            head = self.fitted_by_steps(body, heads[site], site, self.rounds + 1)
            ends.append(torch.cat([body, head]))
        yield "fedrep", self.logits(ends)

    def fitted_by_steps(
        self, body: Tensor, head: Tensor, site: int, number: int
    ) -> Tensor:
        """Return a site's head after ``HEAD_EPOCHS`` with a fixed body."""
        rows = self.own(self.cell.training, site)
        read = torch.zeros(len(self.federation.labels), self.federation.width)
        flat = torch.cat([body, head])
        read[rows] = self.read(flat, rows)
        loss = partial(self.federation.loss, read=read)
        order = self.cell.batches(number)[site]
        many = np.concatenate([order] * HEAD_EPOCHS)
        return epoch(loss, head, many, Arm(HEAD_RATE))[0]

    def body_trained(self, body: Tensor, head: Tensor, rows: Array, arm: Arm) -> Tensor:
        """Return a body after an epoch with a fixed head."""
        federation = self.federation

        def loss(flat: Tensor, batch: Array) -> Tensor:
            return federation.loss(torch.cat([flat, head]), batch)

        return epoch(loss, body, rows, arm)[0]

    def pfedfda(self) -> Answers:
        """Yield pFedFDA (McLaughlin and Su, NeurIPS 2024): Gaussians of each site.

        A site's head is the discriminant of a mixture of its own means and covariance
        and those of all sites, with its own priors. It is fixed while the site trains
        the body.
        """
        federation, arm = self.federation, Arm(self.rates["pfedfda"])
        size = federation.size
        flat = federation.start
        for number in range(1, self.rounds + 1):
            heads = self.mixed_heads(flat)
            ends, clients = [], clients_of(self.cell, number)
            for site in clients:
                head = torch.cat([part.flatten().float() for part in heads[site]])
                rows = self.cell.batches(number)[site]
                ends.append(self.body_trained(flat[:-size], head, rows, arm))
            flat = torch.cat([federation.mean(ends, clients), flat[-size:]])
        features = self.read(flat, self.cell.test)
        yield "pfedfda", self.mixtures(flat, features)

    def mixed_heads(self, flat: Tensor) -> list[closed.Head]:
        """Return each site's discriminant of the mixture that its held-out rows choose.

        Shrinkage and temperature are those of the head of all sites: a site's few
        held-out rows do not tell them.
        """
        training, held, classes = (
            self.cell.training,
            self.cell.held_out,
            self.cell.classes,
        )
        features, others = self.read(flat, training), self.read(flat, held)
        labels, true = self.federation.labels[training], self.federation.labels[held]
        total = closed.sums_of(features, labels, classes)
        tried = []
        for shrinkage in SHRINKAGES:
            heads = fitted_task_heads(total, [shrinkage])
            (weight, _), losses = closed.calibrated(others, true, heads)
            divisor = float(heads[0].norm() / weight.norm())
            tried.append((losses.mean(), shrinkage, divisor))
        _, shrinkage, divisor = min(tried)
        best = []
        for site in range(CLIENTS):
            rows = torch.from_numpy(self.cell.client[training] == site)
            own = closed.sums_of(features[rows], labels[rows], classes)
            mixed = [_mixture(own, total, share) for share in MIXTURES]
            pairs = [fitted_task_heads(sums, [shrinkage]) for sums in mixed]
            weight, bias = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            heads = weight / divisor, bias / divisor
            chosen = torch.from_numpy(self.cell.client[held] == site)
            if bool(chosen.any()):
                of_site = others[chosen], true[chosen]
                head, _ = closed.calibrated(*of_site, heads, (1.0,))
            else:
                head = heads[0][0], heads[1][0]
            best.append(head)
        return best

    def logits(self, ends: Sequence[Tensor]) -> Tensor:
        """Return the logits of each site's model at the test rows."""
        federation, answers = self.federation, []
        for flat in ends:
            features = federation.features(flat, self.cell.test)
            answers.append(closed.scores(features, federation.head(flat)))
        return torch.stack(answers)


def _mixture(own: ClassSums, total: ClassSums, share: float) -> ClassSums:
    """Return the sums of a mixture of means and covariances, with a site's priors."""
    priors = total.counts / total.rows
    counts = own.counts + priors
    known = (own.counts > 0)[:, None]
    means = torch.where(known, total.means().lerp(own.means(), share), total.means())
    within = total.within().lerp(own.within(), share)
    sums = counts[:, None] * means
    gram = counts.sum() * within + means.mT @ sums
    return replace(total, counts=counts, sums=sums, gram=gram, trusted=True)


def _fitted_change(inputs: Tensor, labels: Tensor, head: Tensor, pull: float) -> Tensor:
    """Return the change of a head with the lowest loss and pull."""
    change = torch.zeros_like(head).requires_grad_()
    optimiser = torch.optim.LBFGS([change], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        logits = inputs @ (head + change).mT
        value = functional.cross_entropy(logits, labels, reduction="sum")
        value = value + pull * change.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return change.detach()


# What models are worth on own rows


def own_weights(cell: Cell) -> Tensor:
    """Return the weight of each test row for each site, ``[sites, rows]``.

    A row of class ``c`` has the site's share of ``c`` among all its rows, divided by
    the number of test rows of ``c``. Rows of a site sum to 1.
    """
    counts = torch.from_numpy(cell.counted(np.arange(len(cell.client)))).double()
    labels = torch.from_numpy(cell.labels[cell.test])
    tested = torch.bincount(labels, minlength=cell.classes)
    counts[:, tested == 0] = 0
    weights = (counts / tested.clamp(min=1))[:, labels]
    return weights / weights.sum(1, keepdim=True)


def measured(cell: Cell, logits: Tensor) -> Iterator[dict[str, Any]]:
    """Yield for each site accuracy, balanced accuracy, loss and ECE on own rows.

    The row has ``right`` too: which test rows are predicted as labelled.
    """
    labels = torch.from_numpy(cell.labels[cell.test])
    for site, (weights, scores) in enumerate(
        zip(own_weights(cell), logits, strict=True)
    ):
        right = (scores.argmax(1) == labels).double()
        losses = functional.cross_entropy(scores, labels, reduction="none")
        by_class = torch.zeros(2, cell.classes).double()
        by_class[0].index_add_(0, labels, weights)
        by_class[1].index_add_(0, labels, weights * right)
        present = by_class[0] > 0
        recalls = by_class[1][present] / by_class[0][present]
        yield {
            "site": site,
            "rows": int(cell.counts[site].sum()),
            "accuracy": float(weights @ right),
            "balanced": float(recalls.mean()),
            "loss": float(weights @ losses),
            "ece": _calibration(scores.softmax(1), right, weights),
            "right": right,
        }


def _calibration(chances: Tensor, right: Tensor, weights: Tensor) -> float:
    """Return the expected calibration error of weighted rows in ten bins."""
    sure = chances.max(1).values
    bins = (sure * 10).long().clamp(max=9)
    gaps = torch.zeros(10).double().index_add_(0, bins, weights * (right - sure))
    return float(gaps.abs().sum())


def gain(weights: Tensor, right: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the gain in accuracy on own rows, and its standard error over rows."""
    differences = right - other
    mean = float(weights @ differences)
    return mean, float((weights.square() @ (differences - mean).square()).sqrt())


def site_rows(
    federation: Federation,
    arms: Sequence[str],
    rounds: int,
    rates: Mapping[str, float] = RATES,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm and site, and one of all test rows for a global model.

    ``right`` has a bit for each test row, as hexadecimal digits.
    """
    sites = Sites(federation, rounds, rates)
    for name, logits in sites.answers(arms):
        for row in measured(federation.cell, logits):
            bits = np.packbits(row.pop("right").bool().numpy())
            yield {"arm": name, **row, "right": bits.tobytes().hex()}
        if name in ARMS:
            model = sites.played(name)
            yield {"arm": name, "site": -1} | federation.measure(model)


def add_gains(frame: DataFrame, cell_of: Callable[..., Cell]) -> DataFrame:
    """Return rows of ``site_rows`` with their gain over the stronger way alone.

    That is ``alone-head`` or ``alone``, by the mean over the sites of a run. Runs
    without ``alone`` have no gain.

    Args:
        frame: has columns data, skew and seed, too.
        cell_of: returns the cell of these three.
    """
    runs = []
    for place, run in frame.groupby(["data", "skew", "seed"]):
        sites = run[run["site"] >= 0].copy()
        accuracy = sites.groupby("arm")["accuracy"].mean()
        if "alone" in accuracy:
            stronger = accuracy[["alone-head", "alone"]].idxmax()
            weights = own_weights(cell_of(*place))
            bits = {
                (arm, site): torch.from_numpy(_unpacked(digits, weights.shape[1]))
                for arm, site, digits in sites[["arm", "site", "right"]].to_numpy()
            }
            pairs = [
                gain(weights[site], bits[arm, site], bits[stronger, site])
                for arm, site in sites[["arm", "site"]].to_numpy()
            ]
            sites[["gain", "error"]] = pairs
        runs += [sites, run[run["site"] < 0]]
    return pandas.concat(runs).drop(columns="right")


def _unpacked(digits: str, rows: int) -> Any:
    """Return the bits of ``site_rows``, float64 ``[rows]``."""
    packed = np.frombuffer(bytes.fromhex(digits), np.uint8)
    return np.unpackbits(packed)[:rows].astype(np.float64)
