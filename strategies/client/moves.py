"""Matching at a client: the request, the client's answer, and how the server reads it.

The server sends a client its own update and the anchor. The client matches them on its
own data, and answers with group elements. These are computed from activations, and tell
of them. The server checks that they are elements of the model's symmetry before it
applies them, so that every answer preserves the update's function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedrot.alignment.align import Alignment, align, alignment_of
from fedrot.alignment.learning import LearningOptions, learn_alignment, loss_of
from fedrot.collect.activations import collect_activations
from fedrot.collect.random_inputs import forward_inputs
from fedrot.errors import UpdateError
from fedrot.options import AlignmentOptions
from fedrot.strategies.arguments import check_functions
from fedrot.strategies.client.client_rows import Builds, ReadsRows
from fedrot.strategies.wire.arrays import (
    from_arrays,
    tensors_in,
    to_arrays,
)
from fedrot.strategies.wire.flower_compat import failure_of
from fedrot.symmetry import WHOLE_MODEL, Symmetry, symmetry_of
from fedrot.symmetry.canonical import canonical
from fedrot.symmetry.groups import Move
from fedrot.tensors import Tensors

#: The action of the request, its message type, and the names of its records.
ACTION = "fedrot_match"
MESSAGE_TYPE = f"train.{ACTION}"
ANCHOR = "fedrot-anchor"
UPDATE = "fedrot-update"
ELEMENTS = "fedrot-elements"

#: Keys of the request's configuration: whether the server brings the models to
#: canonical form, and whether the client learns rotations instead of matching.
CANONICAL = "fedrot-canonical"
LEARN = "fedrot-learn"

#: Updates from another basis differ in every part.
OTHER_BASIS_OPTIONS = AlignmentOptions(parts=WHOLE_MODEL)


@dataclass(frozen=True)
class Matching:
    """The model, data and options for matching at a client.

    Attributes:
        build: returns a ``transformers`` model, or another model with a ``config``.
        batches: returns the client's inputs: keyword arguments of forward, with
            ``labels`` for ``learning``.
        options: what to align. If ``canonical`` is None, the server decides.
        learning: how to learn rotations if the server asks for it
            (``OtherBasis.learning_passes``): by gradient descent on the loss between
            this client's model and the mean of the others. A pass costs
            ``learning.steps`` training steps.
    """

    build: Builds
    batches: ReadsRows
    options: AlignmentOptions = OTHER_BASIS_OPTIONS
    learning: LearningOptions = field(default_factory=LearningOptions)

    def __post_init__(self) -> None:
        check_functions(self, "build", "batches")


def match_at_client(
    app: ClientApp, setup: Callable[[Message, Context], Matching]
) -> None:
    """Add an action to a ``ClientApp`` that answers the server's requests for matching.

    Args:
        app: the client's app.
        setup: returns model, data and options; called for every request.
    """

    @app.train(ACTION)
    def answer(message: Message, context: Context) -> Message:
        # Building models and drawing batches must not change the random numbers of
        # training.
        with torch.random.fork_rng(devices=[]):
            alignment = _match(message, setup(message, context))
        elements = {move.group.name: move.element for move in alignment.moves}
        return Message(RecordDict({ELEMENTS: to_arrays(elements)}), reply_to=message)


def _match(message: Message, matching: Matching) -> Alignment:
    anchor, update = (
        from_arrays(message.content.array_records[name]) for name in (ANCHOR, UPDATE)
    )
    anchor_model = matching.build()
    update_model = matching.build()
    symmetry = symmetry_of(
        getattr(anchor_model, "config", None), anchor_model.state_dict()
    )
    config = message.content.config_records["config"]
    options = matching.options
    if options.canonical is None:
        options = replace(options, canonical=bool(config[CANONICAL]))
    if options.rotates:
        anchor, update = (canonical(tensors, symmetry) for tensors in (anchor, update))
        symmetry = symmetry.rotated
    for model, tensors in ((anchor_model, anchor), (update_model, update)):
        model.load_state_dict(tensors)
        model.eval()
    if config[LEARN]:
        learning = matching.learning
        if not symmetry.rotates:
            # A residual stream that can only be permuted is not moved.
            parts = tuple(part for part in learning.parts if part != "residual")
            learning = replace(learning, parts=parts)
        return learn_alignment(
            loss_of(anchor_model),
            matching.batches(),
            update,
            anchor,
            symmetry,
            alignment_of((), update, anchor, symmetry),
            learning,
        ).alignment
    inputs = (forward_inputs(anchor_model, batch) for batch in matching.batches())
    return align(
        update,
        anchor,
        symmetry,
        options,
        collect_activations(anchor_model, update_model, inputs, symmetry),
    )


def request(
    config: ConfigRecord,
    node: int,
    anchor: Tensors,
    update: Tensors,
    *,
    canonical_form: bool = False,
    learn: bool = False,
) -> Message:
    """Return the message that asks a node to match its update, or to learn."""
    told = ConfigRecord({**config, CANONICAL: canonical_form, LEARN: learn})
    return Message(
        RecordDict(
            {ANCHOR: to_arrays(anchor), UPDATE: to_arrays(update), "config": told}
        ),
        dst_node_id=node,
        message_type=MESSAGE_TYPE,
    )


def read_moves(message: Message, symmetry: Symmetry) -> tuple[Move, ...]:
    """Return the moves of a client's answer.

    Raises:
        UpdateError: one of them is not of the symmetry.
    """
    if message.has_error():
        raise UpdateError(failure_of(message, "fedrot.strategies.match_at_client"))
    elements = tensors_in(message.content, ELEMENTS)
    groups = {group.name: group for group in symmetry.groups}
    moves = list[Move]()
    for name, element in elements.items():
        group = groups.get(name)
        if group is None or not group.action.contains(element):
            raise UpdateError(
                f"the tensor '{name}' is not an element of the model's symmetry."
            )
        # The server's elements are in float64, and elements compose only in one dtype.
        moves.append(
            Move(group, element.double() if element.is_floating_point() else element)
        )
    # Head permutations must come before elements inside heads.
    return tuple(sorted(moves, key=lambda move: bool(move.group.within)))


def alignment_by(
    moves: Iterable[Move], update: Tensors, anchor: Tensors, symmetry: Symmetry
) -> Alignment:
    """Return moves as an alignment, of canonical models if the stream is rotated."""
    if symmetry.rotates:
        update, anchor = (canonical(tensors, symmetry) for tensors in (update, anchor))
    return replace(
        alignment_of(moves, update, anchor, symmetry), canonical=symmetry.rotates
    )
