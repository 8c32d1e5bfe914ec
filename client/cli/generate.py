"""`specla generate`: text to standard output as it comes, figures to standard error."""

import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specla.client.cli.exits import write_out
from specla.client.config import CoordinatorConfig
from specla.client.logs import configure_logs
from specla.client.options import Options, build_request, timeout_of
from specla.client.results import Collector, Delta, GenerateResult, Started
from specla.rpc.errors import InvalidRequestError

if TYPE_CHECKING:
    from specla.verifier_service.config import VerifierConfig


class Here(NamedTuple):
    """How to run the model in this process; None is the default."""

    target: str | None
    device: str | None
    numerics: str | None
    threads: int | None


class There(NamedTuple):
    """The server to ask instead; None: this process."""

    server: str | None
    ca: Path | None


def generate(prompt: str, options: Options, *, as_json: bool, here: Here, there: There, log_level: str) -> None:
    """Run one generation and print it.

    Raises:
        SpeclaError: see `Client.generate` and `Local`.
    """
    configure_logs(log_level)
    text = _read_prompt(prompt)
    with _generator(text, here, there, options) as generator:
        collector = Collector()
        begun = time.perf_counter()
        for event in generator.stream(text, **options):
            if isinstance(event, Started):
                begun = time.perf_counter()
            elif isinstance(event, Delta) and not as_json:
                write_out(event.text)
            collector.add(event)
        seconds = time.perf_counter() - begun
    result = collector.result()
    if as_json:
        write_out(json.dumps(_object(result), ensure_ascii=False) + "\n")
    elif sys.stdout.isatty():
        write_out("\n")
    print(figures(result, seconds), file=sys.stderr)


def figures(result: GenerateResult, seconds: float) -> str:
    """One line: how much, how fast, how well drafted. `seconds` from the session's opening, prefill included."""
    usage = result.usage
    rate = usage.completion_tokens / seconds if seconds > 0 else 0.0
    return (
        f"{usage.completion_tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s; "
        f"{usage.target_passes} passes, {usage.accepted_tokens} of {usage.drafted_tokens} drafted accepted; "
        f"ended by {result.finish_reason}; seed {result.seed}"
    )


def _generator(text: str, here: Here, there: There, options: Options) -> Any:
    if there.server is not None:
        for name, value in here._asdict().items():
            if value is not None:
                raise InvalidRequestError(name, f"--{name} has no meaning with --server", hint="Leave out one of them")
        from specla.client.sdk import Client
        from specla.rpc.channel import ClientTls

        return Client(there.server, tls=ClientTls(root_ca=there.ca) if there.ca else None)
    if there.ca is not None:
        raise InvalidRequestError("ca", "--ca has no meaning without --server", hint="Leave it out, or name the server")
    from specla.drafter_service.config import DEFAULTS, DrafterConfig
    from specla.verifier_service.config import VerifierConfig

    wanted = options.get("drafter")
    drafters = DrafterConfig.of_names(DEFAULTS if wanted is None else wanted, "drafter")
    given: dict[str, Any] = {name: value for name, value in here._asdict().items() if value is not None}
    config = VerifierConfig(**given)
    _refuse_early(text, options, config)
    from specla.client.local import Local

    return Local(verifier=config, drafters=[drafter for drafter in drafters if drafter.name != "none"])


def _refuse_early(text: str, options: Options, config: "VerifierConfig") -> None:
    """Refuse, before the target is loaded, what the coordinator of this process would refuse when it is.

    Raises:
        SpeclaError: as `Local` and its `stream`.
    """
    from specla.client.coordinator.request import check_request
    from specla.client.tokenizer import Tokenizer
    from specla.v1 import verifier_pb2
    from specla.verifier_service.targets.config import GatedDeltaNetConfig, check_folder

    timeout_of(options)
    request = build_request(text, options)
    check_folder(config.target)
    tokenizer = Tokenizer.load(config.target)
    target = verifier_pb2.GetTargetResponse(
        dims=verifier_pb2.TargetDims(vocab_size=GatedDeltaNetConfig.from_folder(config.target).vocab_size),
        limits=verifier_pb2.Limits(max_prompt_tokens=config.max_prompt_tokens, max_new_tokens=config.max_new_tokens),
    )
    stop_strings = CoordinatorConfig().max_stop_strings
    asyncio.run(check_request(request, tokenizer, target, max_stop_strings=stop_strings))


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    if sys.stdin is None:
        raise InvalidRequestError("prompt", "standard input is closed", hint="Give text")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            "prompt", f"standard input is not UTF-8 at byte {error.start}", hint="Give text"
        ) from None


def _object(result: GenerateResult) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "usage": dataclasses.asdict(result.usage),
    }
