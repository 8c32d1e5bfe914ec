"""What a user touches: SDK, coordinator, Generate server, local engine, command line. Imports without torch."""

from typing import TYPE_CHECKING, Any

from specla.client.options import Options
from specla.client.results import Delta, Event, Finished, GenerateResult, ModelInfo, Started, TokenLogprobs, Usage
from specla.client.sdk import AsyncClient, Client
from specla.rpc import errors
from specla.rpc.errors import SpeclaError

if TYPE_CHECKING:
    from specla.client.local import Local

__all__ = [
    "AsyncClient",
    "Client",
    "Delta",
    "Event",
    "Finished",
    "GenerateResult",
    "Local",
    "ModelInfo",
    "Options",
    "SpeclaError",
    "Started",
    "TokenLogprobs",
    "Usage",
    "errors",
]


def __getattr__(name: str) -> Any:
    """`Local` needs torch, so it is imported when it is first asked for."""
    if name == "Local":
        from specla.client.local import Local

        return Local
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
