from specla.v1 import common_pb2 as _common_pb2
from specla.v1 import verifier_pb2 as _verifier_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetDrafterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDrafterResponse(_message.Message):
    __slots__ = ("drafter_id", "name", "want", "tokenizer_hash", "max_sessions", "capabilities")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    name: str
    want: _common_pb2.FeatureSpec
    tokenizer_hash: str
    max_sessions: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, drafter_id: _Optional[str] = ..., name: _Optional[str] = ..., want: _Optional[_Union[_common_pb2.FeatureSpec, _Mapping]] = ..., tokenizer_hash: _Optional[str] = ..., max_sessions: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class DraftSessionRequest(_message.Message):
    __slots__ = ("session_id", "verifier_id", "verifier_address", "attach_token")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    verifier_id: str
    verifier_address: str
    attach_token: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., verifier_id: _Optional[str] = ..., verifier_address: _Optional[str] = ..., attach_token: _Optional[bytes] = ...) -> None: ...

class DraftSessionResponse(_message.Message):
    __slots__ = ("attached", "detached")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    attached: DrafterAttached
    detached: DrafterDetached
    def __init__(self, attached: _Optional[_Union[DrafterAttached, _Mapping]] = ..., detached: _Optional[_Union[DrafterDetached, _Mapping]] = ...) -> None: ...

class DrafterAttached(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterDetached(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: _verifier_pb2.ClosedReason
    def __init__(self, reason: _Optional[_Union[_verifier_pb2.ClosedReason, str]] = ...) -> None: ...
