"""One drafter's hold on one session: its drafts, what it was told, and what it has proved worth."""

from specla.kernels.sampling import RowLogprobs
from specla.verifier_service.calibration import Calibrator
from specla.verifier_service.cost_model import NodeBudget
from specla.verifier_service.draft_box import DraftBox
from specla.verifier_service.draft_wait import DraftWait
from specla.verifier_service.intake import AttachRequest
from specla.verifier_service.invitation import Invitation
from specla.verifier_service.publish import DrafterEnd
from specla.verifier_service.speed_guard import PROBE_BUDGET, Begin, Reputation, SpeedGuard


class Attachment:
    """Made when a drafter attaches, dropped when it leaves; the scheduler's thread alone touches it.

    Args:
        end: the drafter's link.
        epoch: of the attach token it showed.
        request: what it asked for.
        seq: of its Attach item.
        most_nodes: candidates that fit into one session's pass.
        max_wait_s: longest wait for one draft.
        unconditional: ask and wait for drafts whatever they gain.
        link_calibrator: of all sessions of the drafter's link.
        reputation: likewise.
        invitation: how it begins.
        committed_len: of the session.

    Attributes:
        token: the attach token it showed.
        want: the features it wants.
        top_k: how many of the target's best tokens it wants at each position.
        last_seq: highest number seen of it.
        told_len: tokens it knows.
        told_features: features at positions below it were sent, or never will be.
        told_budget: the last node budget it was told.
        was_asked: whether it was ever asked for a draft; before that it need not have studied the prompt.
        owes: whether it was asked for a draft and has not answered.
        tops: the target's best tokens at positions from told_len on, if it asked for them.
        overhead_s: time its drafting took of the scheduler's thread since the last pass.
        rested_s: time of passes during which it rested, yet to be accounted for.
        reputation: of its link.
        looked_len: length at which it was looked at last.
        look_at: length at which the text of a drafter that rests is looked at next.
    """

    def __init__(
        self,
        end: DrafterEnd,
        epoch: int,
        request: AttachRequest,
        seq: int,
        *,
        most_nodes: int,
        max_wait_s: float,
        unconditional: bool,
        link_calibrator: Calibrator,
        reputation: Reputation,
        invitation: Invitation,
        committed_len: int,
    ):
        self.end = end
        self.epoch = epoch
        self.token = request.token
        self.want = request.want
        self.top_k = request.top_k
        self.last_seq = seq
        self.told_len = request.have_len
        self.told_features = 0
        self.told_budget = 0
        self.was_asked = False
        self.owes = False
        self.tops: list[RowLogprobs] = []
        self.overhead_s = 0.0
        self.rested_s = 0.0
        self.look_at = 0
        self.looked_len = committed_len
        self.drafts = DraftBox()
        self.wait = DraftWait(max_wait_s, unconditional=unconditional)
        self.reputation = reputation
        self.guard = SpeedGuard(
            committed_len,
            reputation,
            invitation.begin,
            deposit=invitation.hand_over(reputation),
            unconditional=unconditional,
        )
        # Should it lose its stream and come back, it begins like any other.
        invitation.begin = Begin.BY_REPUTATION
        self.repetition = invitation.repetition
        self.calibrator = Calibrator(link_calibrator)
        self.budget = NodeBudget(most_nodes)
        if self.guard.probing:
            self.wait.hope()

    def account_for_rest(self) -> None:
        """Decode time earns allowances, also while the drafter rests."""
        rested_s, self.rested_s = self.rested_s, 0.0
        if rested_s:
            self.wait.decode_s += rested_s
            self.guard.rest(rested_s)

    def earn(self, committed_len: int, sessions: int) -> None:
        """Likewise for its link, of passes with so many sessions since the text was looked at last."""
        self.reputation.earn((committed_len - self.looked_len) / sessions)
        self.looked_len = committed_len

    @property
    def node_budget(self) -> int:
        """Candidates worth sending now; 0 while the drafter pauses."""
        if self.guard.paused:
            return 0
        return min(self.budget.nodes, PROBE_BUDGET) if self.guard.probing else self.budget.nodes

    @property
    def is_quiet(self) -> bool:
        """Whether the drafter pauses and knows it: then verdicts wait until it is asked again."""
        return self.guard.paused and self.told_budget == 0
