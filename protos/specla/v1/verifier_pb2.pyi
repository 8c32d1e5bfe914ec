import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from specla.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_VERIFIED: _ClassVar[Outcome]
    OUTCOME_STALE: _ClassVar[Outcome]
    OUTCOME_SUPERSEDED: _ClassVar[Outcome]
    OUTCOME_OWN_PASS: _ClassVar[Outcome]

class ClosedReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOSED_REASON_UNSPECIFIED: _ClassVar[ClosedReason]
    CLOSED_REASON_FINISHED: _ClassVar[ClosedReason]
    CLOSED_REASON_CANCELLED: _ClassVar[ClosedReason]
    CLOSED_REASON_REPLACED: _ClassVar[ClosedReason]
    CLOSED_REASON_REVOKED: _ClassVar[ClosedReason]
    CLOSED_REASON_FAILED: _ClassVar[ClosedReason]
    CLOSED_REASON_DETACHED: _ClassVar[ClosedReason]
    CLOSED_REASON_LOST: _ClassVar[ClosedReason]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_VERIFIED: Outcome
OUTCOME_STALE: Outcome
OUTCOME_SUPERSEDED: Outcome
OUTCOME_OWN_PASS: Outcome
CLOSED_REASON_UNSPECIFIED: ClosedReason
CLOSED_REASON_FINISHED: ClosedReason
CLOSED_REASON_CANCELLED: ClosedReason
CLOSED_REASON_REPLACED: ClosedReason
CLOSED_REASON_REVOKED: ClosedReason
CLOSED_REASON_FAILED: ClosedReason
CLOSED_REASON_DETACHED: ClosedReason
CLOSED_REASON_LOST: ClosedReason

class GetTargetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTargetResponse(_message.Message):
    __slots__ = ("verifier_id", "advertised_address", "model", "numerics_id", "tokenizer_hash", "dims", "limits", "capabilities", "eos_ids")
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    ADVERTISED_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    advertised_address: str
    model: str
    numerics_id: str
    tokenizer_hash: str
    dims: TargetDims
    limits: Limits
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, verifier_id: _Optional[str] = ..., advertised_address: _Optional[str] = ..., model: _Optional[str] = ..., numerics_id: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., dims: _Optional[_Union[TargetDims, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., capabilities: _Optional[_Iterable[str]] = ..., eos_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TargetDims(_message.Message):
    __slots__ = ("vocab_size", "hidden_size", "num_layers")
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    vocab_size: int
    hidden_size: int
    num_layers: int
    def __init__(self, vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_rows", "max_prompt_tokens", "max_new_tokens", "max_sessions", "max_message_bytes")
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_rows: int
    max_prompt_tokens: int
    max_new_tokens: int
    max_sessions: int
    max_message_bytes: int
    def __init__(self, max_rows: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_message_bytes: _Optional[int] = ...) -> None: ...

class SessionsRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[SessionCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[SessionCommand, _Mapping]]] = ...) -> None: ...

class SessionsResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[SessionEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[SessionEvent, _Mapping]]] = ...) -> None: ...

class SessionCommand(_message.Message):
    __slots__ = ("session_id", "start", "issue_attach", "revoke_attach", "credit", "stop", "cancel")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ISSUE_ATTACH_FIELD_NUMBER: _ClassVar[int]
    REVOKE_ATTACH_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    start: Start
    issue_attach: IssueAttach
    revoke_attach: RevokeAttach
    credit: Credit
    stop: Stop
    cancel: Cancel
    def __init__(self, session_id: _Optional[bytes] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., issue_attach: _Optional[_Union[IssueAttach, _Mapping]] = ..., revoke_attach: _Optional[_Union[RevokeAttach, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("prompt_ids", "resumed_ids", "sampling", "stopping", "keep", "numerics_id", "allow_other_numerics", "time_left", "may_stop")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOW_OTHER_NUMERICS_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    MAY_STOP_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    resumed_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    stopping: _common_pb2.Stopping
    keep: _common_pb2.FeatureSpec
    numerics_id: str
    allow_other_numerics: bool
    time_left: _duration_pb2.Duration
    may_stop: bool
    def __init__(self, prompt_ids: _Optional[_Iterable[int]] = ..., resumed_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., stopping: _Optional[_Union[_common_pb2.Stopping, _Mapping]] = ..., keep: _Optional[_Union[_common_pb2.FeatureSpec, _Mapping]] = ..., numerics_id: _Optional[str] = ..., allow_other_numerics: bool = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., may_stop: bool = ...) -> None: ...

class IssueAttach(_message.Message):
    __slots__ = ("drafter_id",)
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    def __init__(self, drafter_id: _Optional[str] = ...) -> None: ...

class RevokeAttach(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Credit(_message.Message):
    __slots__ = ("up_to_len",)
    UP_TO_LEN_FIELD_NUMBER: _ClassVar[int]
    up_to_len: int
    def __init__(self, up_to_len: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("at_len",)
    AT_LEN_FIELD_NUMBER: _ClassVar[int]
    at_len: int
    def __init__(self, at_len: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("session_id", "opened", "prefilled", "committed", "attach_issued", "drafter_changed", "finished", "failed")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ATTACH_ISSUED_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_CHANGED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    opened: Opened
    prefilled: Prefilled
    committed: Committed
    attach_issued: AttachIssued
    drafter_changed: DrafterChanged
    finished: SessionFinished
    failed: _status_pb2.Status
    def __init__(self, session_id: _Optional[bytes] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., attach_issued: _Optional[_Union[AttachIssued, _Mapping]] = ..., drafter_changed: _Optional[_Union[DrafterChanged, _Mapping]] = ..., finished: _Optional[_Union[SessionFinished, _Mapping]] = ..., failed: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("prompt_tokens", "prefill_us")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    prefill_us: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., prefill_us: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("offset", "tokens", "drafted", "passes", "logprobs")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    drafted: _containers.RepeatedScalarFieldContainer[bool]
    passes: _containers.RepeatedCompositeFieldContainer[PassCount]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, offset: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., drafted: _Optional[_Iterable[bool]] = ..., passes: _Optional[_Iterable[_Union[PassCount, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class PassCount(_message.Message):
    __slots__ = ("tokens", "drafted")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    drafted: int
    def __init__(self, tokens: _Optional[int] = ..., drafted: _Optional[int] = ...) -> None: ...

class AttachIssued(_message.Message):
    __slots__ = ("attach_token", "epoch", "verifier_id", "verifier_address")
    ATTACH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    attach_token: bytes
    epoch: int
    verifier_id: str
    verifier_address: str
    def __init__(self, attach_token: _Optional[bytes] = ..., epoch: _Optional[int] = ..., verifier_id: _Optional[str] = ..., verifier_address: _Optional[str] = ...) -> None: ...

class DrafterChanged(_message.Message):
    __slots__ = ("attached", "epoch", "reason")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attached: bool
    epoch: int
    reason: ClosedReason
    def __init__(self, attached: bool = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[ClosedReason, str]] = ...) -> None: ...

class SessionFinished(_message.Message):
    __slots__ = ("reason", "matched_stop_id", "committed_len")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    matched_stop_id: int
    committed_len: int
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., matched_stop_id: _Optional[int] = ..., committed_len: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DraftItem]
    def __init__(self, items: _Optional[_Iterable[_Union[DraftItem, _Mapping]]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[VerdictItem]
    def __init__(self, items: _Optional[_Iterable[_Union[VerdictItem, _Mapping]]] = ...) -> None: ...

class DraftItem(_message.Message):
    __slots__ = ("session_id", "seq", "attach", "topology", "detach")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    seq: int
    attach: Attach
    topology: Topology
    detach: Detach
    def __init__(self, session_id: _Optional[bytes] = ..., seq: _Optional[int] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., topology: _Optional[_Union[Topology, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("attach_token", "have_len", "want", "top_k")
    ATTACH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HAVE_LEN_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    attach_token: bytes
    have_len: int
    want: _common_pb2.FeatureSpec
    top_k: int
    def __init__(self, attach_token: _Optional[bytes] = ..., have_len: _Optional[int] = ..., want: _Optional[_Union[_common_pb2.FeatureSpec, _Mapping]] = ..., top_k: _Optional[int] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Topology(_message.Message):
    __slots__ = ("base_len", "root_token", "assumed", "tokens", "parents", "log_probs")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    ROOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ASSUMED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    root_token: int
    assumed: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, base_len: _Optional[int] = ..., root_token: _Optional[int] = ..., assumed: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class VerdictItem(_message.Message):
    __slots__ = ("session_id", "seq", "attached", "verdict", "closed", "error")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    seq: int
    attached: Attached
    verdict: Verdict
    closed: Closed
    error: _status_pb2.Status
    def __init__(self, session_id: _Optional[bytes] = ..., seq: _Optional[int] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("tokens", "committed_len", "sampling", "node_budget", "features")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NODE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    committed_len: int
    sampling: _common_pb2.Sampling
    node_budget: int
    features: Features
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., committed_len: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., node_budget: _Optional[int] = ..., features: _Optional[_Union[Features, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("outcome", "base_len", "accepted_nodes", "tokens", "committed_len", "features", "top", "node_budget", "pass_us")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    NODE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    PASS_US_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    base_len: int
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    committed_len: int
    features: Features
    top: _containers.RepeatedCompositeFieldContainer[TopTokens]
    node_budget: int
    pass_us: int
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., base_len: _Optional[int] = ..., accepted_nodes: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., committed_len: _Optional[int] = ..., features: _Optional[_Union[Features, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TopTokens, _Mapping]]] = ..., node_budget: _Optional[int] = ..., pass_us: _Optional[int] = ...) -> None: ...

class TopTokens(_message.Message):
    __slots__ = ("ids", "log_probs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("from_position", "values")
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    from_position: int
    values: _common_pb2.Tensor
    def __init__(self, from_position: _Optional[int] = ..., values: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: ClosedReason
    def __init__(self, reason: _Optional[_Union[ClosedReason, str]] = ...) -> None: ...

class ReadFeaturesRequest(_message.Message):
    __slots__ = ("session_id", "attach_token", "from_position", "to_position")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    TO_POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    attach_token: bytes
    from_position: int
    to_position: int
    def __init__(self, session_id: _Optional[bytes] = ..., attach_token: _Optional[bytes] = ..., from_position: _Optional[int] = ..., to_position: _Optional[int] = ...) -> None: ...

class ReadFeaturesResponse(_message.Message):
    __slots__ = ("features",)
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    features: Features
    def __init__(self, features: _Optional[_Union[Features, _Mapping]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session_id", "prompt_len", "committed_len", "drafter_attached", "age_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    prompt_len: int
    committed_len: int
    drafter_attached: bool
    age_s: float
    def __init__(self, session_id: _Optional[bytes] = ..., prompt_len: _Optional[int] = ..., committed_len: _Optional[int] = ..., drafter_attached: bool = ..., age_s: _Optional[float] = ...) -> None: ...
