"""Updates of an attacker, and strategies that receive them."""

import torch
from flwr.app import MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping as ServerSideAdaptive,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping as ServerSideFixed,
)
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, FedTrimmedAvg, Krum

import fedrot
from fedrot.strategies import Aligned, FedRot, Guard, OtherBasis, Server
from tests.models import config_of
from tests.strategies.classifier import NAME, build

CONFIG = config_of(NAME)


def filled(base, change, within=""):
    """Return the model with every floating-point tensor changed whose name contains
    ``within``.
    """
    return {
        name: change(tensor)
        if tensor.is_floating_point() and within in name
        else tensor
        for name, tensor in base.items()
    }


def constant(value):
    return lambda tensor: torch.full_like(tensor, value)


def times(value):
    return lambda tensor: tensor * value


def alternating(value):
    def signs(tensor):
        found = torch.full_like(tensor, value)
        found.view(-1)[1::2] *= -1
        return found

    return signs


def gaussian(value):
    generator = torch.Generator().manual_seed(1)
    return lambda tensor: value * torch.randn(tensor.shape, generator=generator)


#: Finite updates that a server in float32 can hold, and that no alignment can be
#: computed from.
KINDS = {
    "0": (constant(0.0), ""),
    "times 1e-40": (times(1e-40), ""),
    "constant 1e-42": (constant(1e-42), ""),
    "first layer denormal": (times(1e-40), "layer.0."),
    "last layer denormal": (constant(1e-42), "layer.1."),
    "queries denormal": (constant(1e-45), "query"),
    "squares vanish": (times(1e-20), ""),
    "constant 1e5": (constant(1e5), ""),
    "gaussian 1e10": (gaussian(1e10), ""),
    "times 1e14": (times(1e14), ""),
    "alternating 1e15": (alternating(1e15), ""),
    "norms 1e12": (constant(1e12), "LayerNorm"),
    "first layer 1e15": (gaussian(1e15), "layer.0."),
}


def attack(base, kind):
    change, within = KINDS[kind]
    return filled(base, change, within)


def behind(strategy, *wrapped, **settings):
    """Return a function that builds a strategy of Flower with alignment in front."""
    return lambda: type(f"Aligned{strategy.__name__}", (Aligned, strategy), {})(
        CONFIG, *wrapped, **settings
    )


def _guard(number, arrays):
    return MetricRecord({"loss": 1.0})


def _parts(parts, **options):
    return {"alignment": fedrot.AlignmentOptions(parts=tuple(parts), **options)}


OTHER = OtherBasis(build)

_CLIPPED = {
    "noise_multiplier": 0.0,
    "num_sampled_clients": 4,
    "alignment": fedrot.AlignmentOptions(anchor="global"),
}

#: Ways to align and average, by name. With other bases, activations are computed from
#: the updates.
SETUPS = {
    **{
        anchor: lambda anchor=anchor: FedRot(
            CONFIG, alignment=fedrot.AlignmentOptions(anchor=anchor)
        )
        for anchor in fedrot.alignment.anchors.ANCHORS
    },
    "FedMedian": behind(FedMedian),
    "FedAdam": behind(FedAdam),
    "FedTrimmedAvg": behind(FedTrimmedAvg),
    "Krum": behind(Krum, num_malicious_nodes=0),
    "clipped": behind(ServerSideFixed, FedAvg(), clipping_norm=1.0, **_CLIPPED),
    "clipped adaptively": behind(ServerSideAdaptive, FedAvg(), **_CLIPPED),
    "guard": lambda: FedRot(CONFIG, guard=Guard("loss", evaluate=_guard)),
    "deterministic": lambda: FedRot(CONFIG, server=Server(deterministic=True)),
    "whole model": lambda: FedRot(CONFIG, **_parts(fedrot.WHOLE_MODEL)),
    "heads and scales": lambda: FedRot(CONFIG, **_parts(("heads", "attention", "ffn"))),
    "chance 0": lambda: FedRot(CONFIG, **_parts(("attention", "ffn"), chance=0)),
    "canonical": lambda: FedRot(CONFIG, **_parts(("attention", "ffn"), canonical=True)),
    "other basis": lambda: FedRot(CONFIG, other_basis=OTHER),
}
