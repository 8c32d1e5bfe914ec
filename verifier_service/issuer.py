"""Attach tokens: minted when a coordinator asks for one, or later, if the drafter that it names has brought nothing.

Until a drafter is attached, a dozen messages go between three parts. Where the last sessions of its link gained nothing
they would be spent in vain; so most sessions wait with the token, decode plainly, and look meanwhile for what speaks
for a try.
"""

import hashlib
import math
import secrets
from collections.abc import Callable

from specla.v1 import verifier_pb2
from specla.v1.verifier_pb2 import SessionEvent
from specla.verifier_service.drafting import DraftDesk
from specla.verifier_service.invitation import Invitation
from specla.verifier_service.repetition import LOOK_EVERY
from specla.verifier_service.roster import LiveSession
from specla.verifier_service.speed_guard import FIRST_REST, PROBE_EVERY, Begin

_TOKEN_BYTES = 16
_HELD_FOR = 32  # tokens that a session decodes: by then its drafter has attached, or will hardly
_MOST_OF_ID = 64  # characters; of longer ones a digest is remembered


class Issuer:
    """Mints attach tokens. The scheduler's thread alone touches it.

    Args:
        drafts: knows what drafters were worth.
        verifier_id: told to drafters with each token.
        address: where drafters reach this verifier; asked for when a token is minted.
    """

    def __init__(self, drafts: DraftDesk, verifier_id: str, address: Callable[[], str]) -> None:
        self._drafts = drafts
        self._verifier_id = verifier_id
        self._address = address

    def invite(self, live: LiveSession, drafter_id: str) -> None:
        """Mint a token for a drafter, now or when it is worth a try."""
        if len(drafter_id) > _MOST_OF_ID:
            drafter_id = hashlib.sha256(drafter_id.encode()).hexdigest()
        invitation = Invitation(drafter_id, live.session.committed_len)
        live.invite(invitation)
        reputation = self._drafts.reputation_of(invitation.drafter_id)
        if reputation is not None and live.attachment is None:
            if reputation.spares():
                invitation.look_at = 0
                rest = FIRST_REST * PROBE_EVERY if reputation.gave_up else 0
                invitation.due_at = live.session.committed_len + rest
                return
            invitation.begin = Begin.AT_ONCE
            invitation.leave_deposit(reputation)
        self._mint(live, invitation)

    def look(self, live: LiveSession, sessions: int) -> None:
        """Mint the token that a session waits with, if something speaks for its drafter now. Of one that was minted and
        never used the deposit goes back.

        Args:
            live: the session.
            sessions: that took part in its last pass.
        """
        invitation = live.invitation
        if invitation is None or invitation.look_at == math.inf:
            return
        if invitation.is_minted:
            invitation.drop()
            invitation.look_at = math.inf
            return
        tokens, reputation = live.session.tokens, self._drafts.reputation_of(invitation.drafter_id)
        passes, invitation.looked_len = len(tokens) - invitation.looked_len, len(tokens)
        invitation.look_at = len(tokens) + LOOK_EVERY
        if reputation is None:  # it has gone; whoever comes in its place is unknown
            self._mint(live, invitation)
            return
        reputation.earn(passes / sessions)
        if reputation.in_red:
            return
        if invitation.repetition.begins(tokens, reputation.woken_in_vain):
            invitation.begin = Begin.AS_WOKEN_TRY
            invitation.leave_deposit(reputation)
            self._mint(live, invitation)
        elif len(tokens) >= invitation.due_at:
            invitation.begin = Begin.AS_TRY if reputation.gave_up else Begin.AT_ONCE
            invitation.leave_deposit(reputation)
            self._mint(live, invitation)

    def settle(self, live: LiveSession, sessions: int) -> None:
        """A text has ended while its token waited: what it decoded since the last look counts, too."""
        invitation = live.invitation
        if invitation is None or invitation.is_minted:
            return
        reputation = self._drafts.reputation_of(invitation.drafter_id)
        if reputation is not None:
            reputation.earn((len(live.session.tokens) - invitation.looked_len) / sessions)

    def _mint(self, live: LiveSession, invitation: Invitation) -> None:
        invitation.is_minted = True
        invitation.look_at = len(live.session.tokens) + _HELD_FOR
        live.epoch += 1
        live.attach_token = secrets.token_bytes(_TOKEN_BYTES)
        issued = verifier_pb2.AttachIssued(
            attach_token=live.attach_token,
            epoch=live.epoch,
            verifier_id=self._verifier_id,
            verifier_address=self._address(),
        )
        live.put(SessionEvent(session_id=live.session_id, attach_issued=issued))
