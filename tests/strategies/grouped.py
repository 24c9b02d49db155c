"""Arguments of a strategy, written flat and passed on in their groups."""

from fedrot.strategies import Checkpointing, OtherBasis, Reporting, Server

_GROUPS = {
    "other_basis": (
        OtherBasis,
        {"model": "model", "other_basis": "options", "at_clients": "at_clients"},
    ),
    "server": (
        Server,
        {name: name for name in ("min_replies", "device", "wire", "deterministic")},
    ),
    "checkpoints": (Checkpointing, {"folder": "folder", "keep": "keep"}),
    "reporting": (Reporting, {"rows": "rows", "on_round": "on_round"}),
}


def grouped(**flat):
    """Return keyword arguments of ``FedRot``; those that belong to no group stay as
    they are.
    """
    found = {}
    for group, (kind, names) in _GROUPS.items():
        own = {names[name]: flat.pop(name) for name in names if name in flat}
        if own:
            found[group] = kind(**own)
    return flat | found
