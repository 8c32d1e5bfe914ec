"""From messages to checked values: nothing unchecked goes past this module, nothing here changes a session."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specla.kernels.sampling import SamplingError, SamplingParams
from specla.kernels.topology import Topology, TopologyError
from specla.rpc.errors import (
    DeadlineError,
    InvalidRequestError,
    NumericsMismatchError,
    PromptTooLongError,
    TopologyRefusedError,
)
from specla.v1 import common_pb2, verifier_pb2
from specla.verifier_service.acceptance import Stopping
from specla.verifier_service.features import FeatureWindow

SESSION_ID_BYTES = 16
MAX_TOP_K = 64  # target's best tokens a drafter may ask for at each position
MAX_TOP_LOGPROBS = 64
MAX_BIASES = 16384
MAX_IDS = 65536  # stop_ids, banned_ids


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What this verifier accepts; fixed at its start."""

    vocab_size: int
    num_layers: int
    eos_ids: frozenset[int]
    numerics_id: str
    max_rows: int
    max_prompt_tokens: int
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """A checked Start.

    Attributes:
        session_id: 16 bytes.
        prompt_ids: at least one token.
        resumed_ids: completion so far, fewer than `stopping.max_tokens`.
        keep: hidden states to keep for drafters, None for none.
        time_left_s: of the caller's deadline, None without one.
    """

    session_id: bytes
    prompt_ids: list[int]
    resumed_ids: list[int]
    sampling: SamplingParams
    stopping: Stopping
    keep: FeatureWindow | None
    time_left_s: float | None


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A checked topology: candidates behind the token at position `base_len` - 1.

    Attributes:
        seq: the drafter's number of it.
        base_len: committed length it was drafted for.
        root_token: token at `base_len` - 1.
        assumed: tokens at `base_len` - len(assumed) .. `base_len` - 1 that the drafter took for granted.
        tokens: N - 1 candidates.
        parents: candidate index of each one's parent, -1 for the root.
        log_probs: of each given its parent, <= 0.
        topology: the N rows.
    """

    seq: int
    base_len: int
    root_token: int
    assumed: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...]
    topology: Topology


@dataclass(frozen=True)
class AttachRequest:
    """A checked Attach; the token itself is compared by the session's own record."""

    token: bytes
    have_len: int
    want: FeatureWindow | None
    top_k: int


def check_session_id(session_id: bytes) -> bytes:
    """Raises InvalidRequestError unless it has 16 bytes."""
    if len(session_id) != SESSION_ID_BYTES:
        raise InvalidRequestError(
            "session_id", f"a session id has {SESSION_ID_BYTES} bytes, not {len(session_id)}", hint="Draw 16 at random"
        )
    return session_id


def check_start(session_id: bytes, start: verifier_pb2.Start, limits: Limits) -> OpenRequest:
    """Check everything a Start says.

    Raises:
        InvalidRequestError, PromptTooLongError: the first field that cannot be used, and what may be given.
        NumericsMismatchError: the text was begun elsewhere under other numerics.
        DeadlineError: no time is left.
    """
    if not start.prompt_ids:
        raise InvalidRequestError("prompt_ids", "the prompt is empty", hint="Give at least one token")
    if len(start.prompt_ids) > limits.max_prompt_tokens:
        raise PromptTooLongError(
            "prompt_ids",
            f"the prompt has {len(start.prompt_ids)} tokens",
            hint=f"At most {limits.max_prompt_tokens} are allowed",
            metadata={"max_prompt_tokens": str(limits.max_prompt_tokens)},
        )
    stopping = check_stopping(start.stopping, limits)
    if len(start.resumed_ids) >= stopping.max_tokens:
        raise InvalidRequestError(
            "resumed_ids",
            f"{len(start.resumed_ids)} resumed tokens leave nothing of max_tokens {stopping.max_tokens}",
            hint="Resume with fewer tokens than max_tokens",
        )
    prompt_ids, resumed_ids = list(start.prompt_ids), list(start.resumed_ids)
    check_ids("prompt_ids", prompt_ids, limits.vocab_size)
    check_ids("resumed_ids", resumed_ids, limits.vocab_size)
    if start.numerics_id and start.numerics_id != limits.numerics_id and not start.allow_other_numerics:
        raise NumericsMismatchError(
            "the text was begun under other numerics than this verifier's",
            hint="Find a verifier of the same numerics_id, or allow other numerics",
            metadata={"wanted": start.numerics_id[:200], "here": limits.numerics_id[:200]},
        )
    time_left_s = None
    if start.HasField("time_left"):
        time_left_s = start.time_left.seconds + start.time_left.nanos * 1e-9
        if time_left_s <= 0:
            raise DeadlineError("no time is left of the caller's deadline", hint="Allow more time")
    return OpenRequest(
        session_id=session_id,
        prompt_ids=prompt_ids,
        resumed_ids=resumed_ids,
        sampling=check_sampling(start.sampling, limits.vocab_size),
        stopping=stopping,
        keep=check_features("keep", start.keep, limits),
        time_left_s=time_left_s,
    )


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(field, f"{count} entries are too many", hint=f"Give at most {most}")


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequestError unless every id is in the vocabulary; names the place, never the prompt."""
    if ids and max(ids) >= vocab_size:
        place = next(i for i, token in enumerate(ids) if token >= vocab_size)
        raise InvalidRequestError(
            f"{field}[{place}]", "the id is outside the vocabulary", hint=f"Give ids from 0 to {vocab_size - 1}"
        )


def check_sampling(sampling: common_pb2.Sampling, vocab_size: int) -> SamplingParams:
    """The sampler's parameters; what is unset has its default.

    Raises:
        InvalidRequestError: the first that cannot be used, or no seed where one is needed.
    """
    _check_count("sampling.logit_bias", len(sampling.logit_bias), MAX_BIASES)
    _check_count("sampling.banned_ids", len(sampling.banned_ids), MAX_IDS)
    given = {
        name: getattr(sampling, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "top_logprobs",
        )
        if sampling.HasField(name)  # type: ignore[arg-type]
    }
    params = SamplingParams(**given, logit_bias=dict(sampling.logit_bias), banned_ids=frozenset(sampling.banned_ids))
    try:
        params.validate(vocab_size)
    except SamplingError as error:
        raise InvalidRequestError(
            f"sampling.{error.field}", f"{error.field} is {error.what}", hint=f"Give {error.allowed}"
        ) from None
    if params.top_logprobs is not None and params.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            "sampling.top_logprobs", f"top_logprobs is {params.top_logprobs}", hint=f"0 to {MAX_TOP_LOGPROBS}"
        )
    if not params.is_greedy and "seed" not in given:
        raise InvalidRequestError("sampling.seed", "a sampled text needs a seed", hint="Draw one of 64 bits")
    return params


def check_stopping(stopping: common_pb2.Stopping, limits: Limits) -> Stopping:
    """When the text ends; unset max_tokens is this verifier's limit.

    Raises:
        InvalidRequestError: max_tokens out of range, too many ids, or one outside the vocabulary.
    """
    _check_count("stopping.stop_ids", len(stopping.stop_ids), MAX_IDS)
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else limits.max_new_tokens
    if max_tokens > limits.max_new_tokens:
        raise InvalidRequestError(
            "stopping.max_tokens",
            f"max_tokens is {max_tokens}",
            hint=f"Give 1 to {limits.max_new_tokens}",
            metadata={"max_new_tokens": str(limits.max_new_tokens)},
        )
    checked = Stopping(
        max_tokens=max_tokens,
        stop_ids=frozenset(stopping.stop_ids),
        ignore_eos=stopping.ignore_eos,
        eos_ids=limits.eos_ids,
    )
    checked.validate(limits.vocab_size)
    return checked


def check_features(field: str, spec: common_pb2.FeatureSpec, limits: Limits) -> FeatureWindow | None:
    """A wish for hidden states, None where nothing is wished.

    Raises:
        InvalidRequestError: a layer that does not exist or is named twice, more positions than a text can have.
    """
    if not spec.layers or spec.window == 0:
        return None
    _check_count(f"{field}.layers", len(spec.layers), limits.num_layers + 1)
    most = limits.max_prompt_tokens + limits.max_new_tokens
    if spec.window > most:
        raise InvalidRequestError(
            f"{field}.window",
            f"window is {spec.window}",
            hint=f"Give at most {most} positions, max_prompt_tokens + max_new_tokens: no text has more",
        )
    window = FeatureWindow(tuple(spec.layers), spec.window)
    try:
        window.validate(limits.num_layers)
    except InvalidRequestError as error:
        error.field = error.field.replace("keep", field, 1)
        raise
    return window


def check_attach(attach: verifier_pb2.Attach, keep: FeatureWindow | None, committed_len: int) -> AttachRequest:
    """A drafter's wish to attach, against what the session keeps.

    Raises:
        InvalidRequestError: layers the session does not keep, too many best tokens, more tokens than there are.
    """
    if attach.have_len > committed_len:
        raise InvalidRequestError(
            "attach.have_len", f"the session has {committed_len} tokens, not {attach.have_len}", hint="Start from 0"
        )
    if attach.top_k > MAX_TOP_K:
        raise InvalidRequestError("attach.top_k", f"top_k is {attach.top_k}", hint=f"0 to {MAX_TOP_K}")
    want = None
    if attach.want.layers and attach.want.window:
        kept = keep.layers if keep is not None else ()
        missing = sorted(set(attach.want.layers) - set(kept))
        if missing:
            raise InvalidRequestError(
                "attach.want.layers",
                f"the session does not keep the features of layers {missing[:8]}",
                hint="The coordinator names them in Start.keep",
            )
        want = FeatureWindow(tuple(attach.want.layers), attach.want.window)
    return AttachRequest(attach.attach_token, attach.have_len, want, attach.top_k)


def check_draft(seq: int, topology: verifier_pb2.Topology, limits: Limits) -> Draft:
    """A draft, apart from how it fits the session's present length.

    Raises:
        InvalidRequestError: ids outside the vocabulary, wrong lengths, NaN or positive log-probabilities.
        TopologyRefusedError: parents that are no tree, equal siblings, too many candidates.
    """
    tokens, parents = tuple(topology.tokens), tuple(topology.parents)
    log_probs, assumed = tuple(topology.log_probs), tuple(topology.assumed)
    try:
        tree = Topology.from_wire(parents, tokens, max_rows=limits.max_rows)
    except TopologyError as error:
        hint = f"-1 is the root; parents come first, siblings differ; at most {limits.max_rows - 1} candidates"
        raise TopologyRefusedError("topology.parents", str(error), hint=hint) from None
    check_ids("topology.tokens", tokens, limits.vocab_size)
    check_ids("topology.assumed", assumed, limits.vocab_size)
    check_ids("topology.root_token", (topology.root_token,), limits.vocab_size)
    if len(log_probs) != len(tokens):
        raise InvalidRequestError(
            "topology.log_probs", f"{len(log_probs)} for {len(tokens)} candidates", hint="Give one a candidate"
        )
    for place, log_prob in enumerate(log_probs):
        if not log_prob <= 0:  # written so that NaN is refused too
            what = "NaN" if math.isnan(log_prob) else "positive"
            raise InvalidRequestError(
                f"topology.log_probs[{place}]", f"the log-probability is {what}", hint="Give 0 or less"
            )
    if assumed and assumed[-1] != topology.root_token:
        raise InvalidRequestError(
            "topology.assumed", "the last assumed token is not the root", hint="End assumed with root_token"
        )
    if topology.base_len < max(1, len(assumed)):
        raise InvalidRequestError(
            "topology.base_len", f"base_len {topology.base_len} leaves no root", hint="Count prompt and output"
        )
    return Draft(
        seq=seq,
        base_len=topology.base_len,
        root_token=topology.root_token,
        assumed=assumed,
        tokens=tokens,
        parents=parents,
        log_probs=log_probs,
        topology=tree,
    )
