"""What stands around every call of a server: errors to status, a limit on calls, the set of calls in flight.

An exception of ours reaches the client with its details; any other becomes INTERNAL (see faults.py).
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from grpc_status import rpc_status

from specla.rpc.errors import CapacityError, InvalidRequestError, SpeclaError
from specla.rpc.faults import internal_error
from specla.rpc.status import to_status

log = structlog.get_logger("specla.rpc")

# A probe or a question about the API must be answered by a server that is full.
_ALWAYS_SERVED = ("/grpc.health.", "/grpc.reflection.")

Context = grpc.aio.ServicerContext[Any, Any]
if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
else:
    Handler = grpc.RpcMethodHandler  # generic in its stubs only


class CallGuard(grpc.aio.ServerInterceptor):
    """Guards every call of one server.

    grpc.aio's own `maximum_concurrent_rpcs` miscounts after rejections, and its `stop` returns before
    handlers have run their `finally`; so both are kept here.

    Attributes:
        calls: tasks of the calls in flight, to be awaited when the server stops.
    """

    def __init__(self, max_concurrent_calls: int):
        self.calls: set[asyncio.Task[Any]] = set()
        self._max_concurrent_calls = max_concurrent_calls
        self._counted = 0
        self._last_words: SpeclaError | None = None

    def end_calls(self, last_words: SpeclaError) -> None:
        """End every call in flight with this error; their handlers run their `finally` first."""
        self._last_words = last_words
        if self.calls:
            log.info("calls ended by the stop", calls=len(self.calls))
        for task in self.calls:
            task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wraps the handler of a call; an unknown method stays unknown."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else None
            make = make or grpc.unary_stream_rpc_method_handler
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            return make(self._streaming(method, inner), _reader(handler), handler.response_serializer)
        make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else None
        make = make or grpc.unary_unary_rpc_method_handler
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        return make(self._unary(method, inner), _reader(handler), handler.response_serializer)

    def _unary(self, method: str, inner: Any) -> Any:
        async def call(request: Any, context: Context) -> Any:
            async with self._guarded(method, context):
                return await inner(_decoded(request), context)

        return call

    def _streaming(self, method: str, inner: Any) -> Any:
        if not inspect.isasyncgenfunction(inner):
            return self._unary(method, inner)

        async def call(request: Any, context: Context) -> None:
            # Not a generator: grpc.aio leaves one unclosed where a call is cancelled in the middle of a write, until
            # the garbage collector comes by.
            async with self._guarded(method, context), aclosing(inner(_decoded(request), context)) as responses:
                async for response in responses:
                    await context.write(response)

        return call

    @asynccontextmanager
    async def _guarded(self, method: str, context: Context) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        counts = not method.startswith(_ALWAYS_SERVED)
        if counts and self._counted >= self._max_concurrent_calls:
            await _abort(context, CapacityError("too many calls at once", retry_after_s=1.0))
        self._counted += counts
        self.calls.add(task)
        try:
            yield
        except SpeclaError as error:
            await _abort(context, error)
        except asyncio.CancelledError:
            if self._last_words is None or context.cancelled():
                raise
            task.uncancel()
            await _abort(context, self._last_words)
        except (grpc.aio.AbortError, grpc.aio.BaseError, GeneratorExit):
            raise
        except Exception as error:
            if context.done():  # a broken stream shows itself as one of several exceptions
                return
            await _abort(context, internal_error(method, error))
        finally:
            self.calls.discard(task)
            self._counted -= counts


class _Undecodable:
    """Stands for bytes that are no message; gRPC itself would answer them with UNKNOWN and a Python class's name."""


def _reader(handler: Handler) -> Callable[[bytes], Any] | None:
    """The handler's deserializer, with `_Undecodable` for what it cannot read."""
    deserialize = handler.request_deserializer
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:
            return _Undecodable()

    return read


def _decoded(request: Any) -> Any:
    """A request, or an iterator of requests, that was readable.

    Raises:
        InvalidRequestError: it was not; an iterator raises it when it comes to the message.
    """
    if isinstance(request, _Undecodable):
        raise InvalidRequestError(
            "request", "the message cannot be decoded", hint="Send the protobuf message that the method takes"
        )
    return _decoded_stream(request) if hasattr(request, "__aiter__") else request


async def _decoded_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _decoded(request)


async def _abort(context: Context, error: SpeclaError) -> None:
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
