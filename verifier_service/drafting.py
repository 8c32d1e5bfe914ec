"""What a drafter sends, taken in, and what it is told: attachments, drafts, verdicts."""

import hmac
from collections.abc import Sequence

from specla.kernels.sampling import RowLogprobs
from specla.rpc.errors import AttachRefusedError, InvalidRequestError, SpeclaError, UnknownSessionError
from specla.rpc.faults import internal_error
from specla.rpc.status import to_status
from specla.v1 import common_pb2, verifier_pb2
from specla.v1.verifier_pb2 import DraftItem, SessionEvent, Verdict, VerdictItem
from specla.verifier_service.attachment import Attachment
from specla.verifier_service.calibration import Calibrator
from specla.verifier_service.draft_box import Answer
from specla.verifier_service.engine import Engine
from specla.verifier_service.intake import Limits, check_attach, check_draft, check_session_id
from specla.verifier_service.publish import MAX_FEATURE_BYTES, DrafterEnd, too_many_items
from specla.verifier_service.roster import LiveSession, Roster, closed_item
from specla.verifier_service.speed_guard import Reputation

_SLAB_BYTES = 1 << 20


class DraftDesk:
    """Takes the items of all drafters in, one by one; a faulty one is answered and changes nothing.

    Args:
        engine: holds the features that drafters want.
        roster: the sessions.
        limits: what is accepted.
        max_wait_s: longest wait for one draft.
        unconditional: ask and wait for drafts whatever they gain.

    Attributes:
        spent_s: what drafting has taken of the scheduler's thread, ever.
    """

    def __init__(self, engine: Engine, roster: Roster, limits: Limits, max_wait_s: float, *, unconditional: bool):
        self._engine = engine
        self._roster = roster
        self._limits = limits
        self._max_wait_s = max_wait_s
        self._unconditional = unconditional
        self._hidden_size = engine.target.config.hidden_size
        self._calibrators: dict[DrafterEnd, Calibrator] = {}
        self._reputations: dict[DrafterEnd, Reputation] = {}
        self._ids: dict[DrafterEnd, str] = {}  # what coordinators call the drafters of these links
        self.spent_s = 0.0
        self._studying: set[DrafterEnd] = set()  # links whose next wake tells them a prompt, or has them study it

    def handle_all(self, end: DrafterEnd, items: Sequence[DraftItem]) -> None:
        """Take the items of one message in; what is left of it once the link has ended is dropped."""
        if too_many := too_many_items(items):
            end.end(too_many)
        for item in items:
            if end.ended:
                return
            self.handle(end, item)

    def handle(self, end: DrafterEnd, item: DraftItem) -> None:
        """Take one item in; whatever is wrong with it is answered on the same link."""
        error: SpeclaError
        try:
            check_session_id(item.session_id)
            self._dispatch(end, item)
            return
        except SpeclaError as refused:
            error = refused
        except Exception as fault:
            error = internal_error("draft item", fault)
        end.put(VerdictItem(session_id=item.session_id[:64], seq=item.seq, error=to_status(error)))
        live = self._roster.get(item.session_id)
        if live is not None and live.attachment is not None and live.attachment.end is end:
            live.attachment.owes = False  # nobody waits for what was refused

    def _dispatch(self, end: DrafterEnd, item: DraftItem) -> None:
        kind = item.WhichOneof("item")
        if kind is None:
            raise InvalidRequestError("item", "the item says nothing", hint="Set one of the oneof's fields")
        live = self._roster.find(item.session_id)
        if not isinstance(live, LiveSession):
            end.put(closed_item(item.session_id, live, item.seq))
            return
        if kind == "attach":
            self._attach(end, live, item.seq, item.attach)
            return
        attachment = live.attachment
        if attachment is None or attachment.end is not end:
            raise AttachRefusedError("this stream is not attached to the session", hint="Send Attach first")
        if item.seq <= attachment.last_seq:
            return  # a duplicate, or overtaken
        if kind == "detach":
            self.detach(live, verifier_pb2.CLOSED_REASON_DETACHED)
            return
        attachment.last_seq = item.seq
        draft = check_draft(item.seq, item.topology, self._limits)
        answers = attachment.drafts.put(draft, live.session.tokens)
        stale = any(answer.seq == item.seq for answer in answers)
        attachment.owes = attachment.owes and stale
        self._answer(live, attachment, answers)

    def _attach(self, end: DrafterEnd, live: LiveSession, seq: int, attach: verifier_pb2.Attach) -> None:
        token, invitation = live.attach_token, live.invitation
        if token is None or invitation is None or not hmac.compare_digest(token, attach.attach_token):
            raise AttachRefusedError("the attach token does not count now", hint="Ask the coordinator for a new one")
        ring = live.session.feature_ring
        request = check_attach(attach, ring.spec if ring is not None else None, live.session.committed_len)
        if live.attachment is not None:
            same = live.attachment.end is end
            self.detach(live, verifier_pb2.CLOSED_REASON_REPLACED, tell_drafter=not same)
        if invitation.drafter_id:
            self._ids.pop(end, None)
            self._ids[end] = invitation.drafter_id
        attachment = Attachment(
            end,
            live.epoch,
            request,
            seq,
            most_nodes=self._limits.max_rows - 1,
            max_wait_s=self._max_wait_s,
            unconditional=self._unconditional,
            link_calibrator=self._calibrators.setdefault(end, Calibrator()),
            reputation=self._reputations.setdefault(end, Reputation()),
            invitation=invitation,
            committed_len=live.session.committed_len,
        )
        live.attachment = attachment
        end.session_ids.add(live.session_id)
        self._put_attached(live, attachment, seq)
        changed = verifier_pb2.DrafterChanged(attached=True, epoch=live.epoch)
        live.put(SessionEvent(session_id=live.session_id, drafter_changed=changed))

    def _put_attached(self, live: LiveSession, attachment: Attachment, seq: int) -> None:
        tokens = live.session.tokens
        attached = verifier_pb2.Attached(
            tokens=tokens[attachment.told_len :],
            committed_len=len(tokens),
            sampling=live.sampling,
            node_budget=attachment.node_budget,
        )
        self._add_features(live, attachment, attached.features)
        self._mark_told(live, attachment)
        attachment.end.put(VerdictItem(session_id=live.session_id, seq=seq, attached=attached))
        self._studying.add(attachment.end)

    def detach(self, live: LiveSession, reason: verifier_pb2.ClosedReason, *, tell_drafter: bool = True) -> None:
        """Let a session's drafter go, if it has one."""
        attachment, live.attachment = live.attachment, None
        if attachment is None:
            return
        attachment.end.session_ids.discard(live.session_id)
        attachment.guard.end()
        if tell_drafter:
            attachment.end.put(closed_item(live.session_id, reason))
        changed = verifier_pb2.DrafterChanged(attached=False, epoch=attachment.epoch, reason=reason)
        live.put(SessionEvent(session_id=live.session_id, drafter_changed=changed))

    def lose(self, end: DrafterEnd) -> None:
        """Let all sessions of a link go whose drafter is gone."""
        for session_id in list(end.session_ids):
            live = self._roster.get(session_id)
            if live is not None and live.attachment is not None and live.attachment.end is end:
                self.detach(live, verifier_pb2.CLOSED_REASON_LOST)
        end.session_ids.clear()
        self._calibrators.pop(end, None)
        self._reputations.pop(end, None)
        self._ids.pop(end, None)
        self._studying.discard(end)

    def reputation_of(self, drafter_id: str) -> Reputation | None:
        """What sessions have made of the drafter that coordinators call so; None if it is not known, or does not
        matter."""
        if not drafter_id or self._unconditional:
            return None
        end = next((end for end, known in reversed(self._ids.items()) if known == drafter_id), None)  # the newest
        return self._reputations.get(end) if end is not None else None

    def charge(self, end: DrafterEnd, seconds: float, *, woken: bool = False) -> None:
        """Book what a link took of the scheduler's thread on the sessions that it is asked to draft for: its wake
        (drafting, in one process), what it sent.

        But not what it takes to be told a prompt and to study it: that is spent, whatever drafts are worth, and no
        matter of the link's other sessions. It is the link's, which tries so much less.
        """
        self.spent_s += seconds
        if end in self._studying:
            if (reputation := self._reputations.get(end)) is not None:
                reputation.spend(seconds)
            if woken:
                self._studying.discard(end)
            return
        lives = (self._roster.get(session_id) for session_id in end.session_ids)
        attachments = [live.attachment for live in lives if live is not None and live.attachment is not None]
        asked = [attachment for attachment in attachments if not attachment.is_quiet] or attachments
        for attachment in asked:
            attachment.overhead_s += seconds / len(asked)

    def feature_slabs(self, request: verifier_pb2.ReadFeaturesRequest) -> list[verifier_pb2.Features]:
        """Features of the positions asked for, in messages of about a MiB; those no longer kept are left out.

        Raises:
            UnknownSessionError: no such session, or it has ended.
            AttachRefusedError: the token is not the attached drafter's.
            InvalidRequestError: positions that do not exist yet.
        """
        live = self._roster.find(request.session_id)
        if not isinstance(live, LiveSession):
            raise UnknownSessionError("the session has ended", hint="Features end with their session")
        attachment = live.attachment
        if attachment is None or not hmac.compare_digest(attachment.token, request.attach_token):
            raise AttachRefusedError("the attach token does not count now", hint="Attach first")
        if not request.from_position < request.to_position < live.session.committed_len:
            raise InvalidRequestError(
                "to_position",
                f"no features of positions {request.from_position} to {request.to_position}",
                hint=f"They exist below {live.session.committed_len - 1}; to_position is exclusive",
            )
        if attachment.want is None:
            return []
        layers = attachment.want.layers
        step = max(1, _SLAB_BYTES // (len(layers) * self._hidden_size * 4))
        slabs = []
        for start in range(request.from_position, request.to_position, step):
            slab = verifier_pb2.Features()
            if read_features(self._engine, live, layers, start, min(start + step, request.to_position), slab):
                slabs.append(slab)
        return slabs

    def report(
        self,
        live: LiveSession,
        *,
        seq: int | None,
        base_len: int,
        accepted_nodes: Sequence[int],
        top: Sequence[RowLogprobs] | None,
        seconds: float,
        is_last: bool,
    ) -> None:
        """Tell a session's drafter of a pass, unless it pauses: then it hears of it with the next probe, or the end.

        Args:
            live: the session, its new tokens included.
            seq: of the draft that the pass verified, None for a pass without one.
            base_len: committed length before the pass.
            accepted_nodes: indices into that draft.
            top: the target's best at each new position, if asked for.
            seconds: duration of the pass.
            is_last: whether the text has ended with it.
        """
        attachment = live.attachment
        if attachment is None:
            return
        attachment.tops.extend(top or ())
        answers = attachment.drafts.advance(live.session.tokens)
        if attachment.guard.start_probe_if_due(live.session.committed_len):
            attachment.wait.hope()
        if seq is not None or is_last or not attachment.is_quiet:
            outcome = verifier_pb2.OUTCOME_OWN_PASS if seq is None else verifier_pb2.OUTCOME_VERIFIED
            verdict = Verdict(
                outcome=outcome, base_len=base_len, accepted_nodes=accepted_nodes, pass_us=round(seconds * 1e6)
            )
            self._put_verdict(live, attachment, seq or 0, verdict)
        self._answer(live, attachment, answers)

    def _answer(self, live: LiveSession, attachment: Attachment, answers: Sequence[Answer]) -> None:
        for answer in answers:
            verdict = Verdict(outcome=answer.outcome, base_len=live.session.committed_len)
            self._put_verdict(live, attachment, answer.seq, verdict)

    def _put_verdict(self, live: LiveSession, attachment: Attachment, seq: int, verdict: Verdict) -> None:
        tokens = live.session.tokens
        verdict.tokens.extend(tokens[attachment.told_len :])
        verdict.committed_len = len(tokens)
        verdict.node_budget = attachment.node_budget
        for best in attachment.tops:
            entry = verdict.top.add()
            entry.ids.extend(token for token, _ in best.top)
            entry.log_probs.extend(log_prob for _, log_prob in best.top)
        self._add_features(live, attachment, verdict.features)
        self._mark_told(live, attachment)
        attachment.end.put(VerdictItem(session_id=live.session_id, seq=seq, verdict=verdict))

    def _mark_told(self, live: LiveSession, attachment: Attachment) -> None:
        is_news = live.session.committed_len > attachment.told_len or attachment.told_budget == 0
        attachment.told_len = live.session.committed_len
        attachment.told_budget = attachment.node_budget
        if attachment.told_budget and not attachment.was_asked:
            attachment.was_asked = True
            self._studying.add(attachment.end)
        attachment.tops.clear()
        attachment.owes = attachment.told_budget > 0 and (is_news or attachment.owes)

    def _add_features(self, live: LiveSession, attachment: Attachment, features: verifier_pb2.Features) -> None:
        """The wanted features of positions not yet sent, the newest of them if they are too many."""
        ring, want = live.session.feature_ring, attachment.want
        if want is None or ring is None:
            return
        stop = live.session.committed_len - 1
        per_position = len(want.layers) * self._hidden_size * 4
        room = min(MAX_FEATURE_BYTES // per_position, want.window)
        start = max(attachment.told_features, stop - room)
        attachment.told_features = stop
        if start < stop:
            read_features(self._engine, live, want.layers, start, stop, features)


def read_features(
    engine: Engine, live: LiveSession, layers: Sequence[int], start: int, stop: int, into: verifier_pb2.Features
) -> int:
    """Write the kept features of positions in [start, stop) into a message; returns how many there were."""
    ring = live.session.feature_ring
    if ring is None:
        return 0
    found = engine.features(live.session, start, stop)
    if found.values.shape[0] == 0:
        return 0
    values = found.values[:, [ring.spec.layers.index(layer) for layer in layers]].contiguous()
    into.from_position = found.from_position
    into.values.dtype = common_pb2.DTYPE_FLOAT32
    into.values.shape.extend(values.shape)
    into.values.data = values.numpy().tobytes()
    return int(values.shape[0])
