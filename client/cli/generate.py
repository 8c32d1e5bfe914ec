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
from specla.rpc.errors import InvalidRequestError, SpeclaError

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


class SoFar(NamedTuple):
    """What a generation that broke off has given, as `--json` prints it."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


def generate(
    prompt: str, options: Options, *, resume: Path | None, as_json: bool, here: Here, there: There, log_level: str
) -> None:
    """Run one generation, or the rest of one, and print it. If it breaks off, say how to go on.

    Raises:
        SpeclaError: see `Client.generate` and `Local`.
    """
    configure_logs(log_level)
    former = _resumed(resume, options) if resume is not None else SoFar()
    text = _read_prompt(prompt)
    with _generator(text, here, there, options) as generator:
        collector = Collector()
        begun = time.perf_counter()
        try:
            for event in generator.stream(text, **options):
                if isinstance(event, Started):
                    begun = time.perf_counter()
                elif isinstance(event, Delta) and not as_json:
                    write_out(event.text)
                collector.add(event)
        except SpeclaError:
            _say_how_to_go_on(collector, former, as_json)
            raise
        seconds = time.perf_counter() - begun
    result = collector.result()
    if as_json:
        _write_json(collector, former, result)
    elif sys.stdout.isatty():
        write_out("\n")
    print(figures(result, seconds), file=sys.stderr)


def figures(result: GenerateResult, seconds: float) -> str:
    """One line: how much came, how fast, how well drafted; `seconds` from the session's opening, prefill included."""
    usage, tokens = result.usage, len(result.token_ids)
    rate = tokens / seconds if seconds > 0 else 0.0
    return (
        f"{tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s; "
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


def _resumed(file: Path, options: Options) -> SoFar:
    """What a file has of a generation; from now on the options ask for the rest of it."""
    if options.get("seed") is not None:
        raise InvalidRequestError("seed", "--seed has no meaning with --resume", hint="Leave out one of them")
    try:
        part = json.loads(file.read_text(encoding="utf-8"))
        former, seed, numerics_id = SoFar(part["text"], tuple(part["token_ids"])), part["seed"], part["numerics_id"]
        kinds = [(former.text, str), (seed, int), (numerics_id, str), *((token, int) for token in former.token_ids)]
        if not all(type(value) is kind for value, kind in kinds):
            raise TypeError
        (former.text + numerics_id).encode()  # no half of a surrogate pair
        ended = part["finish_reason"]
    except OSError as error:
        raise InvalidRequestError("resume", f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidRequestError(
            "resume", f"{file} is no output of --json", hint="Give what `specla generate --json` printed"
        ) from None
    if ended is not None:  # its text has what was held back until its end, and would have it again
        raise InvalidRequestError("resume", f"the text of {file} had ended ({ended})", hint="Give one that broke off")
    options["resumed_ids"], options["seed"], options["numerics_id"] = former.token_ids, seed, numerics_id
    return former


def _say_how_to_go_on(collector: Collector, former: SoFar, as_json: bool) -> None:
    started = collector.started
    if started is None:
        return  # it never began: the same command does
    if as_json:
        _write_json(collector, former, None)
    tokens = len(former.token_ids) + len(collector.token_ids)
    way = "--resume goes on from what was printed" if as_json else "with --json, --resume could go on from here"
    print(
        f"broken off after {tokens} tokens; seed {started.seed}, numerics_id {started.numerics_id}; {way}",
        file=sys.stderr,
    )


def _write_json(collector: Collector, former: SoFar, result: GenerateResult | None) -> None:
    """All of a generation, resumed or not; of one that broke off (no result) as far as it came."""
    assert collector.started is not None
    printed = {
        "text": former.text + collector.text,
        "token_ids": [*former.token_ids, *collector.token_ids],
        "finish_reason": result.finish_reason if result else None,
        "seed": collector.started.seed,
        "numerics_id": collector.started.numerics_id,
        "usage": dataclasses.asdict(result.usage) if result else None,
    }
    write_out(json.dumps(printed, ensure_ascii=False) + "\n")
