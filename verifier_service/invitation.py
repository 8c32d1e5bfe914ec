"""What a session remembers of the drafter that its coordinator would like to have attached."""

import math

from specla.verifier_service.repetition import Repetition
from specla.verifier_service.speed_guard import Begin, Reputation


class Invitation:
    """A drafter that a session's coordinator would like to have attached.

    Args:
        drafter_id: as its coordinator knows it; empty if it does not say.
        committed_len: of the session.

    Attributes:
        begin: how the drafter begins once it attaches.
        looked_len: length at which the text was looked at last.
        is_minted: whether its token has been minted.
        look_at: length at which the session is looked at next; infinity if there is nothing to look for.
        due_at: length at which it is minted in any case.
        repetition: what is looked for.
    """

    def __init__(self, drafter_id: str, committed_len: int = 0) -> None:
        self.drafter_id = drafter_id
        self.begin = Begin.BY_REPUTATION
        self.looked_len = committed_len
        self.is_minted = False
        self.look_at = math.inf
        self.due_at = 0
        self.repetition = Repetition()
        self._creditor: Reputation | None = None
        self._deposit = 0.0

    def leave_deposit(self, reputation: Reputation) -> None:
        """Before a token is minted for a try."""
        self.drop()
        self._creditor, self._deposit = reputation, reputation.grant()

    def hand_over(self, reputation: Reputation) -> float:
        """A drafter of this reputation attaches; returns what was left there, which is yet to be refunded."""
        if self._creditor is not reputation:
            self.drop()
        self._creditor, deposit, self._deposit = None, self._deposit, 0.0
        return deposit

    def drop(self) -> None:
        """Nobody will attach: the deposit goes back."""
        if self._creditor is not None:
            self._creditor.refund(self._deposit)
        self._creditor, self._deposit = None, 0.0
