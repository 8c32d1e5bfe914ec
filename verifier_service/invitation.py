"""What a session remembers of the drafter that its coordinator would like to have attached."""

import math

from specla.verifier_service.repetition import Repetition
from specla.verifier_service.speed_guard import Begin


class Invitation:
    """A drafter that a session's coordinator would like to have attached.

    Args:
        drafter_id: as its coordinator knows it; empty if it does not say.

    Attributes:
        begin: how the drafter begins once it attaches.
        deposit_s: that its session has left with the drafter's reputation.
        look_at: length at which the text is looked at next, while the token waits; infinity when it does not.
        due_at: length at which it is minted in any case.
        repetition: what is looked for.
    """

    def __init__(self, drafter_id: str) -> None:
        self.drafter_id = drafter_id
        self.begin = Begin.BY_REPUTATION
        self.deposit_s = 0.0
        self.look_at = math.inf
        self.due_at = 0
        self.repetition = Repetition()
