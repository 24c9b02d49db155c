"""Arms of a comparison: ways to average, and the grammar of their names."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from fedrot.aggregation import aggregations
from fedrot.aggregation.registry import AggregationEntry
from fedrot.anchors import ANCHORS
from fedrot.lora import AdapterOptions
from fedrot.options import AlignmentOptions
from fedrot.simulations.plugins import load_plugins
from fedrot.strategies import Guard
from fedrot.symmetry import WHOLE_MODEL

if TYPE_CHECKING:
    from fedrot.simulations.config import SimulationConfig

#: Evidence for matching replies in another basis: ``probe`` (weights, and activations on random tokens
#: where the residual stream is permuted), ``weights`` (weights alone), ``clients`` (activations on the
#: clients' data, matched at the clients), and ``learned`` (weights, and then a common basis that the
#: clients learn).
EVIDENCE = ("probe", "weights", "clients", "learned")
#: Evidence that is used at the clients.
AT_CLIENTS = ("clients", "learned")
#: Options of an arm, with functions that read their values.
OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "layers": lambda value: (int(value),) if value.isdigit() else value,
    "within_heads": str,
}
#: Start of the name of an arm that averages LoRA adapters, and its options; see ``AdapterOptions``.
OF_ADAPTERS = "lora-"
ADAPTER_OPTIONS: Mapping[str, Callable[[str], Any]] = {"gauge": str, "regmean_alpha": float}

#: Ends of the names of arms that fit the task head to the clients' rows: that of the final model, or of
#: the model of every round.
TASK_HEAD = "+task-head"
EACH_ROUND = f"{TASK_HEAD}-each-round"

#: Names of arms that errors suggest.
COMMON = ("plain", "aligned", "whole", *(f"{arm}{TASK_HEAD}" for arm in ("plain", "aligned")))

#: The aggregation of arms without ``/AGGREGATION``.
MEAN = "mean"


@dataclass(frozen=True)
class Together:
    """A way to evaluate all clients' updates together; it gives no model that clients could train.

    Attributes:
        evaluate: returns the metrics. Its arguments are the task, the arm, a model to load weights into,
            and the updates.
        refused: returns why the arm or its configuration is not allowed; empty if it is. The
            configuration is None while a name is read.
    """

    evaluate: Callable[..., dict[str, float]]
    refused: Callable[[Arm, SimulationConfig | None], str] = lambda arm, config: ""


#: Ways to evaluate updates together, by the name of the aggregation. Plug-ins add theirs.
TOGETHER: dict[str, Together] = {}

#: Plug-ins' readers of names outside of the grammar: each returns an arm, or None.
READERS: list[Callable[[str], Arm | None]] = []

#: Name of the whole model with its residual stream rotated, not permuted.
STREAM = "stream"

#: Arms that train one model on all clients' data, as an upper bound: for as many epochs as the clients,
#: or for as many steps as one client.
JOINED, JOINED_STEPS = "joined", "joined-steps"


#: The pieces of a name; their values are checked later.
_GRAMMAR = re.compile(
    r"(?P<what>[^(@~*:/#]*)(\((?P<options>[^)]*)\))?(@(?P<anchor>[^~*:/#]*))?(~(?P<evidence>[^*:/#]*))?"
    r"(\*(?P<chance>[^:/#]*))?(?P<colon>:(?P<guard>[^/#]*))?"
    r"(/(?P<aggregation>[^(#]*)(\((?P<arguments>[^)]*)\))?)?(#(?P<clients>.*))?"
)
#: Functions that list subsets of clients, by the name after ``#``; see ``expanded``.
SUBSETS: Mapping[str, Callable[[int], Iterator[tuple[int, ...]]]] = {
    "pairs": lambda count: itertools.combinations(range(count), 2),
    "subsets": lambda count: itertools.chain.from_iterable(
        itertools.combinations(range(count), size) for size in range(2, max(count, 3))
    ),
}


class Arm(BaseModel):
    """One way to average: ``plain``, or aligned, as ``PARTS(OPTIONS)@ANCHOR~EVIDENCE*CHANCE:METRIC``.

    ``PARTS`` are those of ``AlignmentOptions`` joined by ``+``, ``whole``, or ``stream``: the whole
    model, with a rotation of its residual stream in place of a permutation. The arm moves these parts of
    every reply. ``aligned`` in place of ``PARTS`` is ``FedRot`` with its defaults: the default parts,
    and the whole model for replies in another basis. The pieces after ``PARTS`` may be left out. Their
    defaults are the strategy's anchor, the first of ``EVIDENCE``, ``AlignmentOptions.chance``, and no
    guard.

    ``aligned:loss`` is ``FedRot(guard="loss")``. This guard evaluates the two means on the clients' own
    held-out rows (``holdout``). Clients do not train on them; tables report the data set's test rows.

    ``OPTIONS`` are ``KEY=VALUE`` of ``AlignmentOptions``, separated by semicolons: ``layers=last:2``,
    ``layers=0``, ``within_heads=permutation``.

    Any arm may end in ``/AGGREGATION(ARGUMENTS)``, such as ``/regmean(alpha=0.5;batches=4)``. The
    arguments are those of the aggregation; ``batches`` limits the data for the clients' statistics.
    ``fisher`` alone is short for ``plain/fisher``. ``joined`` trains one model on all clients' data,
    ``joined-steps`` for as many steps as one client. ``#0+2`` at the end merges the replies of these
    clients only. ``#pairs`` and ``#subsets`` stand for one arm per pair or subset of clients.

    ``+task-head`` at the very end fits the task head of the final model to all clients' rows
    (``fit_task_head``). The metrics of the last round are those with this head. It needs held-out rows.
    ``+task-head-each-round`` is ``FedRot(fit_head=True)``: the head is fitted before the first round,
    and no round is worse on held-out rows.

    In settings with ``lora`` an arm is ``plain`` (the mean of factors) or ``lora-METHOD(OPTIONS)`` of
    ``AdapterOptions``, ``lora-exact(gauge=previous)`` or ``lora-regmean``.

    Plug-ins add anchors, aggregations, ``TOGETHER`` and ``READERS``.
    """

    model_config = ConfigDict(frozen=True)

    #: Builds the strategy of a cell for a plug-in's arms; see ``arm_strategies.strategy_of``.
    strategy: ClassVar[Callable[..., Any] | None] = None

    name: str
    align: bool
    parts: tuple[str, ...] = ()
    changes: dict[str, Any] = {}
    anchor: str = AlignmentOptions.anchor
    evidence: str = EVIDENCE[0]
    chance: float = AlignmentOptions.chance
    guard: str = ""
    aggregation: str = MEAN
    arguments: dict[str, float] = {}
    batches: int = 0
    clients: tuple[int, ...] = ()
    other_basis: bool = False
    canonical: bool | None = None
    adapters: AdapterOptions | None = None
    fits_task_head: bool = False

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read an arm from its name; raises ``ValueError``."""
        load_plugins()
        if text in (JOINED, JOINED_STEPS):
            return cls(name=text, align=False)
        found = next(filter(None, (read(text) for read in READERS)), None)
        return found or cls.of_grammar(text)

    @classmethod
    def of_grammar(cls, text: str) -> Arm:
        """Read an arm from a name of the grammar above; raises ``ValueError``."""
        averages = text.removesuffix(EACH_ROUND if text.endswith(EACH_ROUND) else TASK_HEAD)
        merges_alone = re.split("[(#]", averages)[0] in known_aggregations()
        match = _GRAMMAR.fullmatch(f"plain/{averages}" if merges_alone else averages)
        if match is None:
            raise ValueError(
                f"arm '{text}' cannot be read; write "
                "PARTS(OPTIONS)@ANCHOR~EVIDENCE*CHANCE:METRIC/AGGREGATION(ARGUMENTS)#CLIENTS"
                f"{TASK_HEAD} or {EACH_ROUND}; all but PARTS may be left out"
            )
        said = {name: value for name, value in match.groupdict().items() if value is not None}
        try:
            fits_task_head = averages != text
            arm = cls.model_validate({"name": text, "fits_task_head": fits_task_head, **_meaning(said)})
        except ValueError as error:
            near = get_close_matches(text, COMMON, 1)
            advice = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"arm '{text}': {error}{advice}") from error
        arm.check(None)
        return arm

    def check(self, config: SimulationConfig | None) -> None:
        """Raise ``ValueError`` if ``TOGETHER`` or the task head does not fit the arm or ``config``."""
        reason = TOGETHER[self.aggregation].refused(self, config) if self.needs_updates else ""
        if self.fits_task_head and (self.needs_updates or self.of_adapters):
            reason = f"'{TASK_HEAD}' needs one model as the result, and this arm has none"
        if reason:
            raise ValueError(f"arm '{self.name}': {reason}")

    @property
    def joined(self) -> bool:
        """Whether the arm trains one model on all clients' data."""
        return self.name in (JOINED, JOINED_STEPS)

    @property
    def fits_each_round(self) -> bool:
        """Whether the task head is fitted after every round, for the clients."""
        return self.name.endswith(EACH_ROUND)

    @property
    def of_adapters(self) -> bool:
        """Whether the arm is only for adapters."""
        return self.adapters is not None

    @property
    def any_server(self) -> bool:
        """Whether the arm's average of adapters can be a server optimiser's input."""
        return True

    @property
    def options(self) -> AlignmentOptions:
        """The alignment options of the arm."""
        of_arm = {
            "parts": self.parts,
            "anchor": self.anchor,
            "chance": self.chance,
            "canonical": self.canonical,
        }
        return AlignmentOptions(**{**of_arm, **self.changes})

    @property
    def aligns_at_clients(self) -> bool:
        """Whether clients align before they compute statistics, which cannot be rotated later."""
        entry = registered().get(self.aggregation)
        return self.align and entry is not None and not entry.follows_rotations

    def takes(self, argument: str) -> bool:
        """Return whether the aggregation needs an argument: ``symmetry`` or ``score``."""
        entry = registered().get(self.aggregation)
        return entry is not None and argument in entry.inputs

    @property
    def chooses(self) -> bool:
        """Whether the arm uses the clients' held-out rows to choose between models."""
        return bool(self.guard) or self.takes("score") or self.fits_task_head

    @property
    def needs_updates(self) -> bool:
        """Whether the arm evaluates all updates together; see ``Together``."""
        return self.aggregation in TOGETHER


def registered() -> dict[str, AggregationEntry]:
    """Return the aggregations, by name, that need no input other than a symmetry and a score."""
    return {entry.name: entry for entry in aggregations({"symmetry", "score"})}


def known_aggregations() -> tuple[str, ...]:
    """Return the names of the aggregations that an arm may have."""
    return (*registered(), *TOGETHER)


def expanded(arms: Sequence[str], clients: int) -> tuple[str, ...]:
    """Return the arms, with ``#pairs`` and ``#subsets`` expanded for a number of clients.

    >>> expanded(["plain", "plain#pairs"], 3)
    ('plain', 'plain#0+1', 'plain#0+2', 'plain#1+2')
    """
    found: list[str] = []
    for arm in arms:
        before, _, kind = arm.partition("#")
        if kind in SUBSETS:
            named = (f"{before}#{'+'.join(map(str, subset))}" for subset in SUBSETS[kind](clients))
            found += [name for name in named if name not in found]
        else:
            found.append(arm)
    return tuple(found)


def _meaning(said: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of an arm from the pieces of its name; raises ``ValueError``."""
    if said["what"].startswith(OF_ADAPTERS):
        return _of_adapters(said)
    aggregation = said.get("aggregation", MEAN)
    chosen = {
        "anchor": said.get("anchor") or AlignmentOptions.anchor,
        "evidence": said.get("evidence") or EVIDENCE[0],
        "aggregation": aggregation,
    }
    known = {"anchor": ANCHORS, "evidence": EVIDENCE, "aggregation": known_aggregations()}
    for name, value in chosen.items():
        if value not in known[name]:
            raise ValueError(f"unknown {name} '{value}'; one of {', '.join(known[name])}")
    merged = {**_arguments(aggregation, said.get("arguments", "")), "clients": _clients(said)}
    moves = said.keys() - {"what", "aggregation", "arguments", "clients"}
    if said["what"] == "plain" and not moves:
        return {"align": False, "aggregation": aggregation, **merged}
    entry = registered().get(aggregation)
    if moves - {"chance"} and entry is not None and not entry.follows_rotations:
        raise ValueError(
            f"with '{aggregation}' clients align to the broadcast model, because its statistics cannot "
            "be rotated later; leave out the options, the anchor, the evidence and the guard"
        )
    return {"align": True, **chosen, **merged, **_moved(said, chosen["evidence"])}


def _moved(said: Mapping[str, str], evidence: str) -> dict[str, Any]:
    """Return the fields of an arm about its alignment."""
    what = said["what"]
    named = {"aligned": AlignmentOptions.parts, "whole": WHOLE_MODEL, STREAM: WHOLE_MODEL}
    parts = named.get(what) or tuple(what.split("+"))
    other_basis = what == "aligned"
    if evidence in AT_CLIENTS and not other_basis:
        raise ValueError(f"evidence '{evidence}' goes with 'aligned' only")
    if evidence in AT_CLIENTS and "options" in said:
        raise ValueError(f"with evidence '{evidence}' clients match themselves; leave out the options")
    changes = _read(said.get("options", ""), OPTIONS)
    try:
        chance = float(said["chance"]) if "chance" in said else AlignmentOptions.chance
        AlignmentOptions(**{"parts": parts, "chance": chance, **changes})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} (or 'plain', 'aligned', 'whole', '{STREAM}')") from error
    if "colon" in said:
        Guard(said["guard"])
        if said.get("aggregation") in TOGETHER:
            raise ValueError(f"a guard compares two means; '{said['aggregation']}' gives no mean")
    return {
        "parts": parts,
        "changes": changes,
        "chance": chance,
        "guard": said.get("guard", ""),
        "other_basis": other_basis,
        "canonical": None if other_basis else what == STREAM,
    }


def _of_adapters(said: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of an arm that averages LoRA adapters."""
    if said.keys() - {"what", "options"}:
        raise ValueError(f"it averages adapters; write {OF_ADAPTERS}METHOD(OPTIONS) and nothing else")
    options = _read(said.get("options", ""), ADAPTER_OPTIONS)
    method = said["what"].removeprefix(OF_ADAPTERS)
    return {"align": False, "adapters": AdapterOptions(method, **options)}


def _read(text: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Return the options in a text; ``known`` has the functions that read their values."""
    options = pairs(text)
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ValueError(f"unknown option '{unknown[0]}'; one of {', '.join(known)}")
    return {key: known[key](value) for key, value in options.items()}


def pairs(text: str, separator: str = ";") -> dict[str, str]:
    """Read ``key=value;key=value``; raises ``ValueError``."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(separator)):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"'{part}' is not of the form KEY=VALUE")
        if key.strip() in found:
            raise ValueError(f"'{key.strip()}' is given twice")
        found[key.strip()] = value.strip()
    return found


def _arguments(aggregation: str, text: str) -> dict[str, Any]:
    """Return the fields ``arguments`` and ``batches`` of an arm; raises ``ValueError``."""
    found = {key: float(value) for key, value in pairs(text).items()}
    batches = found.pop("batches", None)
    if batches is not None and (batches < 1 or batches % 1):
        raise ValueError(f"batches is {batches:g}; give a whole number, at least 1")
    entry = registered().get(aggregation)
    parameters = inspect.signature(entry.build).parameters.values() if entry else ()
    known = [p.name for p in parameters if isinstance(p.default, float)]
    for key in found:
        if key not in known:
            listed = ", ".join(known) or "none"
            raise ValueError(f"'{aggregation}' has no argument '{key}'; it has {listed}")
    if any(not 0 <= value < float("inf") for value in found.values()):
        raise ValueError(f"arguments of '{aggregation}' are finite numbers of at least 0")
    if entry and found:
        entry.build(**found)  # raises FedrotError if a value does not fit
    if batches and not (entry and entry.needs):
        raise ValueError(f"'{aggregation}' needs no statistics; leave out batches, which has no effect")
    return {"arguments": found, "batches": int(batches or 0)}


def _clients(said: Mapping[str, str]) -> tuple[int, ...]:
    """Return the clients of a subset; empty for all clients."""
    if "clients" not in said:
        return ()
    numbers = said["clients"].split("+")
    if not all(map(str.isdigit, numbers)) or sorted(set(map(int, numbers))) != [*map(int, numbers)]:
        raise ValueError(
            f"'#{said['clients']}' names no clients; write #0+2 (increasing), or "
            f"#{' or #'.join(SUBSETS)}"
        )
    return tuple(map(int, numbers))
