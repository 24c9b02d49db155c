"""Arms of a comparison: ways to average, and the grammar of their names."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from fedrot.aggregation import aggregations, entry_named
from fedrot.anchors import ANCHORS
from fedrot.options import AlignmentOptions
from fedrot.strategies import DEFAULT_ANCHOR, Guard
from fedrot.symmetry import WHOLE_MODEL

#: Evidence for matching replies in another basis: weights, and activations on random tokens where the
#: residual stream is permuted; weights alone; weights and the token counts that clients report;
#: activations on the clients' data (matched at the clients); or token counts, and then a common basis
#: that the clients learn.
EVIDENCE = ("probe", "weights", "tokens", "clients", "learned")

#: Arms without a merged model: the clients' models answer together, by the mean of their logits or of
#: their probabilities.
ENSEMBLES = ("ensemble", "ensemble-probabilities")

#: How an arm merges aligned updates: an aggregation that needs at most a symmetry and a score.
AGGREGATIONS = (*(entry.name for entry in aggregations({"symmetry", "score"})), *ENSEMBLES)

#: The whole model, whose residual stream is rotated, not permuted.
STREAM = "stream"

#: The arm of one model trained on all clients' data, an upper bound.
JOINED = "joined"


class Arm(BaseModel):
    """One way to average: ``plain``, or aligned, as ``PARTS@ANCHOR~EVIDENCE*CHANCE:METRIC``.

    ``PARTS`` are those of ``AlignmentOptions`` joined by ``+``, ``whole``, or ``stream``: the whole
    model, with a rotation of its residual stream in place of a permutation. The arm moves these parts of
    every reply. ``aligned`` in their place is ``FedRot`` with its defaults: the default parts, and the
    whole model for replies in another basis. What follows may be left out: the defaults are the
    strategy's anchor, the first of ``EVIDENCE``, ``AlignmentOptions.chance``, and no guard.

    ``aligned:loss`` is ``FedRot(guard="loss")``. This guard evaluates the two means on the clients' own
    held-out rows (``holdout``): nobody trains on them, and tables report the held-out split.

    Each may end in ``/AGGREGATION``; ``ensemble`` is short for ``plain/ensemble``. ``joined`` trains one
    model on all clients' data.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    align: bool
    parts: tuple[str, ...] = ()
    anchor: str = DEFAULT_ANCHOR
    evidence: str = EVIDENCE[0]
    chance: float = AlignmentOptions.chance
    guard: str = ""
    aggregation: str = AGGREGATIONS[0]
    other_basis: bool = False
    canonical: bool | None = None

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read an arm from its name; raises ``ValueError`` with the known names."""
        if text == JOINED:
            return cls(name=text, align=False)
        full = f"plain/{text}" if text in AGGREGATIONS else text
        move, slash, aggregation = full.partition("/")
        unguarded, colon, guard = move.partition(":")
        before, star, chance = unguarded.partition("*")
        rest, _, evidence = before.partition("~")
        what, _, anchor = rest.partition("@")
        aggregation = aggregation if slash else AGGREGATIONS[0]
        chosen = {"anchor": anchor or DEFAULT_ANCHOR, "evidence": evidence or EVIDENCE[0]}
        chosen["aggregation"] = aggregation
        known = {"anchor": ANCHORS, "evidence": EVIDENCE, "aggregation": AGGREGATIONS}
        for name, value in chosen.items():
            if value not in known[name]:
                listed = ", ".join(known[name])
                raise ValueError(f"arm '{text}': unknown {name} '{value}'; one of {listed}")
        if move == "plain":
            return cls(name=text, align=False, aggregation=aggregation)
        if aggregation in ENSEMBLES:
            raise ValueError(f"arm '{text}': an ensemble needs no alignment; use '{aggregation}'")
        if (rest != what or before != rest or colon) and not entry_named(aggregation).follows_rotations:
            raise ValueError(
                f"arm '{text}': for '{aggregation}' clients align to the broadcast model, because its "
                "statistics cannot follow rotations; leave out the anchor, the evidence and the guard"
            )
        named = {"aligned": AlignmentOptions.parts, "whole": WHOLE_MODEL, STREAM: WHOLE_MODEL}
        parts = named.get(what) or tuple(what.split("+"))
        other_basis = what == "aligned"
        if evidence in ("clients", "learned") and not other_basis:
            raise ValueError(f"arm '{text}': evidence '{evidence}' goes with 'aligned'")
        try:
            factor = float(chance) if star else AlignmentOptions.chance
            AlignmentOptions(parts=parts, chance=factor)
        except ValueError as error:
            raise ValueError(
                f"arm '{text}': {error} (or 'plain', 'aligned', 'whole', '{STREAM}')"
            ) from error
        if colon:
            try:
                Guard(guard)
            except ValueError as error:
                raise ValueError(f"arm '{text}': {error}") from error
        arm = {"name": text, "align": True, "parts": parts, "other_basis": other_basis, "guard": guard}
        canonical = None if other_basis else what == STREAM
        return cls.model_validate({**arm, **chosen, "chance": factor, "canonical": canonical})

    @property
    def options(self) -> AlignmentOptions:
        """What the arm moves."""
        return AlignmentOptions(parts=self.parts, chance=self.chance, canonical=self.canonical)

    @property
    def ensemble(self) -> bool:
        """Whether the arm averages the answers of the clients' models."""
        return self.aggregation in ENSEMBLES

    @property
    def aligns_at_clients(self) -> bool:
        """Whether clients align before they compute statistics, which cannot follow rotations."""
        return self.align and not entry_named(self.aggregation).follows_rotations

    def takes(self, argument: str) -> bool:
        """Return whether the aggregation needs an argument: ``symmetry`` or ``score``."""
        return not self.ensemble and argument in entry_named(self.aggregation).inputs
