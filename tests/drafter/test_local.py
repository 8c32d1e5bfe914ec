"""The join in one process: re-entrant, from many threads, with faults that reach the coordinator."""

import threading
from collections.abc import Callable, Sequence

from specla.drafter_service.config import DrafterConfig
from specla.drafter_service.drafter import Drafter
from specla.drafter_service.drafters.lookup import LookupDrafter
from specla.drafter_service.drafters.oracle import OracleDrafter
from specla.drafter_service.local import LocalAttachment, LocalDrafter
from specla.drafter_service.tree import ROOT
from specla.rpc.errors import InvalidRequestError, ServiceUnavailableError, SessionCancelledError, SpeclaError
from specla.rpc.links import IN_PROCESS, Wake
from specla.v1 import drafter_pb2, verifier_pb2

CONFIG = DrafterConfig(max_nodes=4)
TEXT = [token for _ in range(12) for token in range(1, 9)]
PROMPT = 10


class TextVerifier:
    """A VerifierPort whose sessions all say TEXT; it verifies there and then, inside `send`, and wakes from it."""

    def __init__(self, text: Sequence[int] = TEXT) -> None:
        self.text = text
        self.links: list[TextLink] = []
        self.address = IN_PROCESS

    def target(self) -> verifier_pb2.GetTargetResponse:
        return verifier_pb2.GetTargetResponse(verifier_id="text")

    def connect_coordinator(self, wake: Wake) -> "TextLink":
        raise NotImplementedError

    def connect_drafter(self, wake: Wake) -> "TextLink":
        self.links.append(TextLink(self.text, wake))
        return self.links[-1]


class TextLink:
    def __init__(self, text: Sequence[int], wake: Wake) -> None:
        self.received: list[verifier_pb2.DraftItem] = []
        self.lost: SpeclaError | None = None
        self.closed = False
        self.at: dict[bytes, int] = {}
        self.passes: dict[bytes, int] = {}
        self._text = text
        self._wake = wake
        self._items: list[verifier_pb2.VerdictItem] = []
        self._lock = threading.Lock()

    def send(self, items: Sequence[verifier_pb2.DraftItem]) -> None:
        with self._lock:
            for item in items:
                self.received.append(item)
                self._answer(item)
        self._wake()

    def take(self) -> list[verifier_pb2.VerdictItem]:
        with self._lock:
            items, self._items = self._items, []
        return items

    def close(self) -> None:
        self.closed = True

    def lose(self) -> None:
        self.lost = ServiceUnavailableError("the verifier died")
        self._wake()

    def _answer(self, item: verifier_pb2.DraftItem) -> None:
        answer = verifier_pb2.VerdictItem(session_id=item.session_id, seq=item.seq)
        match item.WhichOneof("item"):
            case "attach":
                self.at[item.session_id], self.passes[item.session_id] = PROMPT, 0
                answer.attached.tokens.extend(self._text[:PROMPT])
                answer.attached.committed_len, answer.attached.node_budget = PROMPT, 8
            case "topology":
                self._verify(item.session_id, item.topology, answer.verdict)
                if self.at[item.session_id] == len(self._text):
                    self._items.append(answer)
                    answer = verifier_pb2.VerdictItem(session_id=item.session_id)
                    answer.closed.reason = verifier_pb2.CLOSED_REASON_FINISHED
            case _:
                return
        self._items.append(answer)

    def _verify(self, session_id: bytes, draft: verifier_pb2.Topology, verdict: verifier_pb2.Verdict) -> None:
        at = self.at[session_id]
        assert (draft.base_len, draft.root_token) == (at, self._text[at - 1])
        children = {edge: node for node, edge in enumerate(zip(draft.parents, draft.tokens, strict=True))}
        node, begin = ROOT, at
        while at < len(self._text) - 1 and (node, self._text[at]) in children:
            node, at = children[node, self._text[at]], at + 1
        at += 1
        self.at[session_id] = at
        self.passes[session_id] += 1
        verdict.outcome, verdict.base_len = verifier_pb2.OUTCOME_VERIFIED, begin
        verdict.tokens.extend(self._text[begin:at])
        verdict.committed_len, verdict.node_budget = at, 8


def request(number: int = 0, verifier_id: str = "text") -> drafter_pb2.DraftSessionRequest:
    return drafter_pb2.DraftSessionRequest(
        session_id=number.to_bytes(16, "big"), verifier_id=verifier_id, attach_token=b"t"
    )


def join(drafter: Drafter | None = None) -> tuple[LocalDrafter, TextVerifier]:
    verifier = TextVerifier()
    return LocalDrafter(drafter or OracleDrafter([TEXT], rate=1.0), CONFIG, verifier), verifier


def events(attachment: LocalAttachment) -> list[str | None]:
    return [event.WhichOneof("event") for event in attachment.take()]


def test_a_whole_text_in_one_call_stack() -> None:
    drafter, verifier = join()
    attachment = drafter.draft_session(request(), lambda: None)
    (link,) = verifier.links
    assert link.at[request().session_id] == len(TEXT)
    # 86 tokens, five a pass, the last token by a pass of its own.
    assert link.passes[request().session_id] == 18
    assert events(attachment) == ["attached", "detached"]
    assert attachment.lost is None
    attachment.cancel()
    assert [item.WhichOneof("item") for item in link.received].count("detach") == 0


def test_lookup_learns_a_text_that_repeats_itself() -> None:
    drafter, verifier = join(LookupDrafter())
    drafter.draft_session(request(), lambda: None)
    assert verifier.links[0].at[request().session_id] == len(TEXT)
    assert verifier.links[0].passes[request().session_id] < 30


def test_the_coordinator_is_woken_for_each_event() -> None:
    drafter, _ = join()
    woken: list[list[str | None]] = []
    box: list[LocalAttachment] = []
    drafter_thread = threading.current_thread()

    def wake() -> None:
        assert threading.current_thread() is drafter_thread
        woken.append([])

    box.append(drafter.draft_session(request(), wake))
    assert len(woken) == 2


def test_sessions_from_many_threads_share_one_link_and_all_end() -> None:
    drafter, verifier = join()
    attachments: list[LocalAttachment] = []

    def begin(first: int) -> None:
        attachments.extend(drafter.draft_session(request(n), lambda: None) for n in range(first, first + 8))

    threads = [threading.Thread(target=begin, args=(8 * n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (link,) = verifier.links
    assert set(link.at.values()) == {len(TEXT)}
    assert len(link.at) == 48
    assert [events(attachment) for attachment in attachments] == [["attached", "detached"]] * 48
    seqs = [item.seq for item in link.received]
    assert seqs == sorted(set(seqs))


class SilentVerifier(TextVerifier):
    """Answers nothing until told to."""

    def connect_drafter(self, wake: Wake) -> TextLink:
        link = super().connect_drafter(wake)
        link._answer = lambda item: None  # type: ignore[method-assign]
        return link


def test_cancel_detaches_once() -> None:
    verifier = SilentVerifier()
    drafter = LocalDrafter(OracleDrafter([TEXT]), CONFIG, verifier)
    attachment = drafter.draft_session(request(), lambda: None)
    attachment.cancel()
    attachment.cancel()
    assert [item.WhichOneof("item") for item in verifier.links[0].received] == ["attach", "detach"]
    assert attachment.lost is None


def test_a_cancel_that_comes_with_the_news_of_the_attachment_detaches() -> None:
    verifier, jobs = TextVerifier(), list[Callable[[], None]]()
    drafter = LocalDrafter(LookupDrafter(), CONFIG, verifier, run=jobs.append)
    attachment = drafter.draft_session(request(), lambda: attachment.cancel())
    while jobs:
        jobs.pop(0)()
    assert [item.WhichOneof("item") for item in verifier.links[0].received][-1] == "detach"


def test_a_session_begun_anew_ends_its_former_attachment_only() -> None:
    verifier = SilentVerifier()
    drafter = LocalDrafter(OracleDrafter([TEXT]), CONFIG, verifier)
    former = drafter.draft_session(request(), lambda: None)
    later = drafter.draft_session(request(), lambda: None)
    assert isinstance(former.lost, SessionCancelledError)
    former.cancel()
    assert later.lost is None
    assert [item.WhichOneof("item") for item in verifier.links[0].received] == ["attach", "attach"]


def test_the_loss_of_the_verifier_is_told_and_later_sessions_end_at_once() -> None:
    verifier = SilentVerifier()
    drafter = LocalDrafter(OracleDrafter([TEXT]), CONFIG, verifier)
    woken: list[int] = []
    attachment = drafter.draft_session(request(), lambda: woken.append(1))
    verifier.links[0].lose()
    assert isinstance(attachment.lost, ServiceUnavailableError)
    assert woken == [1]
    assert drafter.lost is not None
    assert isinstance(drafter.draft_session(request(1), lambda: None).lost, ServiceUnavailableError)
    assert len(verifier.links) == 1


def test_a_request_for_another_verifier_is_refused() -> None:
    drafter, verifier = join()
    attachment = drafter.draft_session(request(verifier_id="former"), lambda: None)
    assert isinstance(attachment.lost, InvalidRequestError)
    assert attachment.lost.field == "verifier_id"
    assert verifier.links == []


def test_a_fault_in_the_join_does_not_reach_the_verifiers_thread() -> None:
    class Broken(TextVerifier):
        def connect_drafter(self, wake: Wake) -> TextLink:
            link = super().connect_drafter(wake)
            link.take = lambda: [None]  # type: ignore[list-item,method-assign,return-value]
            return link

    verifier = Broken()
    drafter = LocalDrafter(OracleDrafter([TEXT]), CONFIG, verifier)
    attachment = drafter.draft_session(request(), lambda: None)
    assert attachment.lost is not None
    assert attachment.lost.code == "INTERNAL"
    assert verifier.links[0].closed


def test_info_names_the_drafter() -> None:
    drafter, _ = join(LookupDrafter())
    info = drafter.info()
    assert (info.name, info.max_sessions, info.tokenizer_hash) == ("lookup", CONFIG.max_sessions, "")
    assert len(info.drafter_id) == 32
    assert not info.want.layers
