"""One generation held by a verifier: its tokens, its slot, and what its next pass must know."""

from collections.abc import Sequence

from specla.kernels.sampling import SessionSampling
from specla.kernels.sampling_params import SamplingError, SamplingParams
from specla.rpc.errors import InvalidRequestError, PromptTooLongError
from specla.verifier_service.acceptance import Finish, Stopping
from specla.verifier_service.features import FeatureRing


class Session:
    """A generation. Made by `Engine.open`, changed by the engine alone.

    Attributes:
        session_id: as the coordinator chose it.
        slot: where its state lies, or None once released.
        prompt_len: tokens of the prompt.
        tokens: prompt and output, the bonus token of the last pass included; the last of them is the next pass's root.
        run_len: tokens that the backend has: while decoding, all but the root.
        resumed_len: tokens up to here are replayed, not sampled.
        finish: the end of the text, once it was reached.
    """

    def __init__(
        self,
        session_id: bytes,
        slot: int,
        prompt_ids: Sequence[int],
        resumed_ids: Sequence[int],
        sampling: SessionSampling,
        stopping: Stopping,
        features: FeatureRing | None,
    ) -> None:
        self.session_id = session_id
        self.slot: int | None = slot
        self.prompt_len = len(prompt_ids)
        self.tokens = [*prompt_ids, *resumed_ids]
        self.resumed_len = len(self.tokens)
        self.run_len = 0
        self.finish: Finish | None = None
        self.stopping = stopping
        self.sampling_state = sampling
        self.feature_ring = features

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self.sampling_state.params

    @property
    def committed_len(self) -> int:
        """Tokens of prompt and output, the bonus token included."""
        return len(self.tokens)

    @property
    def completion_len(self) -> int:
        """Tokens of the output, resumed ones included."""
        return len(self.tokens) - self.prompt_len

    @property
    def root_token(self) -> int:
        """The token that the next pass runs first."""
        return self.tokens[-1]

    @property
    def ready(self) -> bool:
        """Whether it may take part in a pass: prefilled, not at its end, not released."""
        return self.slot is not None and self.finish is None and self.run_len == len(self.tokens) - 1


def check_opening(
    prompt_ids: Sequence[int],
    resumed_ids: Sequence[int],
    stopping: Stopping,
    vocab_size: int,
    max_prompt_tokens: int,
) -> None:
    """Refuse a generation that cannot begin.

    Raises:
        InvalidRequestError: an empty prompt, ids outside the vocabulary, stopping that makes no sense, or resumed
            tokens that already end the text.
        PromptTooLongError: more prompt tokens than max_prompt_tokens.
    """
    if not prompt_ids:
        raise InvalidRequestError("prompt_ids", "the prompt is empty", hint="Give at least one token")
    if len(prompt_ids) > max_prompt_tokens:  # resumed tokens are bounded by max_tokens: any text can be resumed
        raise PromptTooLongError(
            "prompt_ids",
            f"the prompt has {len(prompt_ids)} tokens",
            hint=f"At most {max_prompt_tokens} are allowed",
            metadata={"max_prompt_tokens": str(max_prompt_tokens)},
        )
    for name, ids in (("prompt_ids", prompt_ids), ("resumed_ids", resumed_ids)):
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            raise InvalidRequestError(name, "an id is no token of this model", hint=f"Give ids below {vocab_size}")
    stopping.validate(vocab_size)
    for i, token in enumerate(resumed_ids):
        if stopping.finish_of(token, i + 1) is not None:
            raise InvalidRequestError(
                "resumed_ids", f"the text ends with resumed token {i}", hint="Resume only unfinished texts"
            )


def sampling_state(
    params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int], resumed_ids: Sequence[int]
) -> SessionSampling:
    """The sampler's state at the beginning of a generation.

    Raises:
        InvalidRequestError: a parameter that makes no sense.
    """
    try:
        return SessionSampling(params, vocab_size, prompt_ids, resumed_ids)
    except SamplingError as error:
        raise InvalidRequestError(
            f"sampling.{error.field}", f"{error.field} is {error.what}", hint=f"Give {error.allowed}"
        ) from None
