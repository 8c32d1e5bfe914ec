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
        try:
            from specla.client.local import Local
        except ModuleNotFoundError as missing:
            hint = f"Local needs {missing.name}, which the extra [verifier] brings: pip install 'specla[verifier]'"
            raise ModuleNotFoundError(hint, name=missing.name) from missing
        return Local
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
