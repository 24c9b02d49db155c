"""``diagnose``: whether clients are in different coordinates, and what to average."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedrot.alignment.align import Alignment, align_checked
from fedrot.alignment.anchors import SAME_BASIS, RunningAnchor, base_cosine, finder
from fedrot.distances import TIMES_CHANCE, Row, Shares, shares_by, total
from fedrot.errors import FedrotError
from fedrot.matching.anchor import Anchor
from fedrot.matching.chance import null_model
from fedrot.matching.problem import COUPLED
from fedrot.options import AlignmentOptions
from fedrot.report import AlignmentReport
from fedrot.symmetry.groups import NO_LAYER, WHOLE_MODEL, Symmetry, check_symmetry
from fedrot.tensors import Tensors, check_update

# What to do with updates.
#: Average them as they are.
PLAIN = "plain"
#: Align them first.
ALIGNED = "aligned"
#: Match the whole models.
WHOLE = "whole"

#: Alignment is advised if the rotations of all heads together remove more than
#: ``TIMES_CHANCE`` times chance, or if at least this share of the groups does, each
#: judged alone.
GROUPS_BEYOND = 0.1

#: The ``part`` of evidence about all parts.
TOGETHER = "together"

Rows = list[Row]


@dataclass(frozen=True)
class Evidence(Shares):
    """The distances that the best elements of one part and layer remove.

    They are sums over all groups and updates. ``layer`` is None for groups of the whole
    model, and for a sum over layers.
    """

    part: str = TOGETHER
    layer: int | None = None


#: Evidence of several parts and layers.
Lines = tuple[Evidence, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What updates gain from alignment; ``print(diagnosis)`` shows the advice.

    Attributes:
        cosines: of each update's embeddings with the base's, see
            ``fedrot.alignment.anchors.base_cosine``; empty if unknown.
        clients: evidence from aligning each update, except the first, to the mean of
            the updates before.
        base: evidence from aligning each update to the base.
        whole: evidence from matching updates from another basis as whole models. Chance
            is the distance that matching removes from a random model of the same size.
            In the evidence ``TOGETHER`` each entry of the model counts once.
    """

    cosines: tuple[float, ...]
    clients: Lines
    base: Lines
    whole: Lines

    def __str__(self) -> str:
        return self.sentence

    @property
    def choice(self) -> str:
        """The average to take: ``plain``, ``aligned`` or ``whole``."""
        if self.whole:
            return WHOLE
        aligned = beyond_chance(self.clients) or beyond_chance(self.base)
        return ALIGNED if aligned else PLAIN

    @property
    def sentence(self) -> str:
        """The average to take, and the numbers behind this advice."""
        far = [cosine for cosine in self.cosines if cosine < SAME_BASIS]
        advice = _ADVICE[self.choice].format(**self._numbers())
        if not far:
            return advice[0].upper() + advice[1:]
        shared = "" if self.whole else ", and share one"
        return (
            f"{len(far)} of {len(self.cosines)} updates come from another basis than "
            f"the base (cosine of the embeddings {_ranged(far)}){shared}; {advice}"
        )

    def _numbers(self) -> dict[str, str]:
        # The evidence that decides; if none does, that of the clients.
        both = (self.clients, self.base)
        shown = next(filter(beyond_chance, both), self.clients or self.base)
        rotated = summed(shown, ROTATED)
        groups = summed(shown)
        whole = summed(self.whole, TOGETHER)
        numbers = {
            "rotation": "nothing was rotated",
            "beyond": f"{groups.beyond} of {groups.groups} groups exceed "
            f"{TIMES_CHANCE:g} times chance",
            "matching": "chance is not known",
            "data": "",
        }
        if rotated.groups:
            numbers["rotation"] = f"rotation {_shares(rotated, ' of the heads')}"
        if whole.groups:
            numbers["matching"] = f"matching removes {_shares(whole)}"
        if whole.chance is not None and not whole.exceeds(1):
            numbers["data"] = " The weights give no evidence; match on data."
        return numbers

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data."""
        return {"choice": self.choice, "sentence": self.sentence, **asdict(self)}


#: The part whose groups have enough free dimensions to separate evidence from chance.
ROTATED = "attention"

_ADVICE = {
    PLAIN: "nothing beyond chance: an average needs no alignment; {rotation}.",
    ALIGNED: (
        "clients are in different coordinates: average with FedRot, anchor 'running'; "
        "{rotation}, and {beyond}."
    ),
    WHOLE: "match the whole models, FedRot(other_basis=OtherBasis(...)); "
    "{matching}.{data}",
}


def beyond_chance(lines: Sequence[Evidence]) -> bool:
    """Return whether all rotations together, or enough groups, exceed chance."""
    if summed(lines, ROTATED).exceeds(TIMES_CHANCE):
        return True
    groups = summed(lines)
    return 0 < groups.beyond >= GROUPS_BEYOND * groups.groups


def diagnose(
    base: Tensors,
    updates: Sequence[Tensors],
    symmetry: Symmetry,
) -> Diagnosis:
    """Find out whether clients are in different coordinates, and which average to take.

    Each update is aligned to the mean of the updates before it, and to the base. The
    squared distance that alignment removes is compared with what chance removes
    (``fedrot.matching.chance``). An update from another basis is matched as a whole
    model, and a random model of its size shows what chance removes. The inputs are not
    changed.

    Example: ``print(fedrot.diagnose(base, [update_1, update_2], symmetry))``.

    Args:
        base: tensors of the model that the clients received.
        updates: tensors of the clients' models, of the same names and shapes; only two
            or more show whether clients are in different coordinates.
        symmetry: from ``symmetry_of``.

    Raises:
        FedrotError: there are no updates.
        UpdateError: see ``align``.
        SymmetryError: ``symmetry`` is not a ``Symmetry``; or an update comes from
            another basis, and the residual stream of this model cannot be moved.
    """
    check_symmetry(symmetry)
    if not updates:
        raise FedrotError(
            "There are no updates to diagnose. Give at least one, better two or more."
        )
    for tensors in (base, *updates):
        check_update(tensors, symmetry.shapes)
    options = AlignmentOptions()
    anchor = Anchor(base)
    cosines: list[float] = []
    far: list[Tensors] = []
    to_base: Rows = []
    for update in updates:
        cosine = base_cosine(update, base, symmetry)
        cosines.append(cosine)
        if cosine < SAME_BASIS:
            far.append(update)
            continue
        to_base += align_checked(update, anchor, symmetry, options).report.rows()
    # If most updates come from another basis than the base, the mean of the updates
    # starts with the first of these, not with the base.
    centre = far[0] if 2 * len(far) > len(updates) > 1 else base
    near, whole = _to_each_other(base, centre, updates, symmetry, options)
    return Diagnosis(tuple(cosines), evidence(near), evidence(to_base), evidence(whole))


def _to_each_other(
    base: Tensors,
    centre: Tensors,
    updates: Sequence[Tensors],
    symmetry: Symmetry,
    options: AlignmentOptions,
) -> tuple[Rows, Rows]:
    """Align updates to their running mean, which starts at ``centre``.

    Returns:
        Rows of updates in the mean's basis, without those to the base itself; and rows
        of updates in other bases.
    """
    matched = AlignmentOptions(WHOLE_MODEL).movable(symmetry)
    match = finder(centre, symmetry, options, matched)
    near: Rows = []
    whole: Rows = []

    def find(update: Tensors, to: Anchor) -> Alignment:
        alignment = match(update, to)
        rows = alignment.report.rows()
        if _coupled(rows):
            null = null_model(to.tensors, update, symmetry.select(matched.parts))
            # A fresh anchor: ``to`` stores how the last client was aligned.
            drawn = align_checked(null, Anchor(to.tensors), symmetry, matched).report
            whole.extend(_whole_rows(alignment.report, drawn))
        elif to.tensors is not base and to.tensors is not update:
            near.extend(rows)
        return alignment

    running = RunningAnchor(Anchor(centre), find)
    first = [] if centre is base else [centre]
    others = [update for update in updates if update is not centre]
    for update in (*first, *others):
        running.accept(running.align(update).move(update), 1.0)
    return near, whole


def _coupled(rows: Iterable[Row]) -> bool:
    """Return whether the rows of one alignment are those of a whole model."""
    return any(row["part"] in COUPLED for row in rows)


def _whole_rows(report: AlignmentReport, null: AlignmentReport) -> Rows:
    """Return a whole model's rows; chance is what the null model's match removes."""
    pairs = zip(_with_total(report), _with_total(null), strict=True)
    return [_whole_row(row, _removed(drawn)) for row, drawn in pairs]


def _with_total(report: AlignmentReport) -> Rows:
    """Return the rows of a report, and a row about all parts together."""
    together = {
        "part": TOGETHER,
        "layer": NO_LAYER,
        "before": report.before,
        "after": report.after,
        "moved": 1,
    }
    return [*report.rows(), together]


def _whole_row(row: Row, chance: float | None = None) -> Row:
    # For whole models, ``found`` of a row leaves out the first guess of the residual
    # stream.
    return {**row, "found": _removed(row), "chance": chance}


def _removed(row: Row) -> float:
    return float(row["before"] - row["after"])


def diagnosis_of(rows: Iterable[Row]) -> Diagnosis:
    """Return the diagnosis of a finished run from its alignment's rows.

    Args:
        rows: of ``GroupReport`` for each group, with ``client``, ``round`` and, if
            there are several, ``seed``.
    """
    near: Rows = []
    whole: Rows = []
    by_update: dict[tuple[Any, ...], Rows] = defaultdict(list)
    for row in rows:
        by_update[row.get("seed"), row["round"], row["client"]].append(row)
    for of_update in by_update.values():
        if _coupled(of_update):
            whole += map(_whole_row, of_update)
        else:
            near += of_update
    return Diagnosis((), evidence(near), (), evidence(whole))


def evidence(rows: Iterable[Row]) -> Lines:
    """Return the evidence of rows by part and layer, in the order of the rows."""

    def key(row: Row) -> tuple[str, int | None]:
        return row["part"], None if row["layer"] == NO_LAYER else row["layer"]

    return tuple(
        Evidence(**vars(shares), part=part, layer=layer)
        for (part, layer), shares in shares_by(rows, key).items()
    )


def summed(lines: Iterable[Evidence], part: str | None = None) -> Evidence:
    """Return the evidence of all layers of a part, of all parts if None."""
    of_part = total(line for line in lines if part in (None, line.part))
    return Evidence(**vars(of_part), part=part or TOGETHER)


def _shares(line: Evidence, whose: str = "") -> str:
    chance = line.chance_share
    beside = "not known" if chance is None else f"{100 * chance:z.1f} %"
    return f"{100 * line.share:z.1f} % of the distance{whose}, chance {beside}"


def _ranged(values: Sequence[float]) -> str:
    low = f"{min(values):.2f}"
    high = f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
