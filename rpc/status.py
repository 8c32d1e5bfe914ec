"""SpeclaError <-> google.rpc.Status, the one table of both directions."""

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specla.rpc import errors
from specla.rpc.errors import InvalidRequestError, SpeclaError

DOMAIN = "specla"
MAX_BYTES = 400  # of one text: gRPC drops details beyond some 16 KiB, and ours stay below 4 KiB
MAX_FACTS = 8

_BY_REASON: dict[str, type[SpeclaError]] = {
    cls.reason: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, SpeclaError)
}


def to_status(error: SpeclaError) -> status_pb2.Status:
    """The status of an error, with ErrorInfo and, where they apply, BadRequest, Help text and RetryInfo."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    for name, value in list(error.metadata.items())[:MAX_FACTS]:
        info.metadata[_cut(name, 40)] = _cut(value, 200)
    if error.hint:
        info.metadata["hint"] = _cut(error.hint)
    details = [_pack(info)]
    if isinstance(error, InvalidRequestError):
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=_cut(error.field, 100), description=_cut(str(error)))
        details.append(_pack(bad))
    if isinstance(error, errors.CapacityError):
        delay = Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=code_pb2.Code.Value(error.code), message=_cut(error.message), details=details)


def from_status(status: status_pb2.Status) -> SpeclaError:
    """The error of a status; one of unknown reason becomes a SpeclaError that carries its code."""
    info, violation, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    for detail in status.details:
        for message in (info, violation, retry):
            if detail.Is(message.DESCRIPTOR):
                detail.Unpack(message)
    metadata = dict(info.metadata)
    hint = metadata.pop("hint", "")
    cls = _BY_REASON.get(info.reason, SpeclaError) if info.domain == DOMAIN else SpeclaError
    if issubclass(cls, InvalidRequestError):
        field = violation.field_violations[0].field if violation.field_violations else ""
        return cls(field, status.message, hint=hint, metadata=metadata)
    if issubclass(cls, errors.CapacityError):
        return cls(status.message, retry_after_s=retry.retry_delay.ToMilliseconds() / 1000, hint=hint)
    error = cls(status.message, hint=hint, metadata=metadata)
    if cls is SpeclaError:
        error.code = code_pb2.Code.Name(status.code)  # type: ignore[misc]
    return error


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed


def _cut(text: str, size: int = MAX_BYTES) -> str:
    """At most so many bytes of a text, whole characters."""
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore")
