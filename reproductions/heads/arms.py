"""The arms: heads without training, federated rivals, and fedrot's fitted head."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """A federation of several rounds, or a head without training.

    Rates were chosen from five by the held-out loss of dair_emotion, Dirichlet 0.3,
    seed 10.
    """

    rate: float = 0.0  # of the clients; 0: nothing is trained
    start: str = ""  # the first head, see Federation.heads; empty: drawn at random
    #: When a head is fitted to the sums of all clients: never, last or every round.
    fit: str = "never"
    head: str = "lda"  # how, see Federation.heads
    steps: tuple[float, ...] = (
        1.0,
    )  # candidates: 0 is the body before the round, 1 the average
    #: The model before the round is a candidate: none is worse on held-out rows.
    old: bool = False
    shifted: bool = (
        False  # FedLC: -n_kc^(-1/4) is added to logits (Zhang et al., ICML 2022)
    )
    #: FedProx: mu / 2 |w - start|^2 is added to the loss (Li et al., MLSys 2020).
    pull: float = 0.0
    scaffold: bool = (
        False  # gradients have control variates (Karimireddy et al., ICML 2020)
    )
    sgd: bool = False  # plain steps in place of Adam's
    everyone: bool = False  # all rows are in one place


#: Published rivals. SCAFFOLD with Adam is ours: its gradients are corrected before
#: Adam.
RIVALS = {
    "step0": Arm(start="lda"),
    "fedcof": Arm(start="fedcof"),
    "afl": Arm(start="ridge"),
    "fedncm": Arm(start="means"),
    "fedavg": Arm(2e-4),
    "ccvr": Arm(2e-4, fit="last", head="ccvr"),
    "fedprox-0.01": Arm(2e-4, pull=0.01),
    "scaffold": Arm(0.1, scaffold=True, sgd=True),
    "scaffold-adam": Arm(2e-4, scaffold=True),
    "fedlc": Arm(5e-4, shifted=True),
    "lp-ft": Arm(2e-4, start="probe"),
    "fedncm+ft": Arm(2e-4, start="means"),
    "fed3r+ft": Arm(1e-4, start="ridge"),
}
ARMS = RIVALS | {
    "fedavg+fit": Arm(2e-4, fit="last"),
    "ours-lowest": Arm(5e-4, start="lda", fit="every", steps=(0.5, 1.0), old=True),
    "central": Arm(1e-4, everyone=True),
}
