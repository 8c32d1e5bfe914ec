"""What a request may ask of the sampler, and how a wrong wish is refused. Imports no torch and no NumPy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Within these bounds no float32 overflows on the way from finite logits to a draw.
SMALLEST_TEMPERATURE = 9.999999747378752e-05  # the float32 next to 1e-4, as which 1e-4 comes over the wire; 0 is greedy
SMALLEST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY = 1e-3, 1e3
LARGEST_BIAS = 1e4
LARGEST_SEED = (1 << 64) - 1


class SamplingError(ValueError):
    """A sampling parameter that cannot be used.

    Attributes:
        field: the parameter's name.
        what: what was found.
        allowed: what may be given instead.
    """

    def __init__(self, field: str, what: str, allowed: str):
        super().__init__(f"{field} is {what}: give {allowed}")
        self.field, self.what, self.allowed = field, what, allowed


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen; the defaults change nothing about the model's own distribution.

    The parameters apply in this order: logit_bias, repetition_penalty, presence_ and frequency_penalty, banned_ids,
    division by the temperature, top_k, top_p, min_p; then the token is drawn with the noise of (seed, position).

    Attributes:
        temperature: 0 is greedy; otherwise at least 1e-4.
        top_k: keep the k largest logits, and those equal to the k-th; 0 is off.
        top_p: keep the most likely tokens until their probabilities sum to it, and those equal to the last; 1 is off.
        min_p: keep tokens at least this many times as likely as the most likely one; 0 is off.
        repetition_penalty: over ids of prompt and output: positive logits are divided by it, others multiplied;
            from 1e-3 to 1e3.
        presence_penalty: taken off the logit of every id in the output.
        frequency_penalty: taken off the logit of an id as often as it stands in the output.
        logit_bias: token id to what is added to its logit, from -1e4 to 1e4.
        banned_ids: ids that are never produced.
        seed: 64 bits; with the position it fixes the draw.
        top_logprobs: None for no log-probabilities, otherwise how many of the best beside the chosen one's.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_ids: frozenset[int] = frozenset()
    seed: int = 0
    top_logprobs: int | None = None

    def validate(self, vocab_size: int | None = None) -> None:
        """Refuses the first parameter that cannot be used; with a vocab_size also ids outside the vocabulary.

        Raises:
            SamplingError: which parameter, what was found, what is allowed.
        """
        t = self.temperature
        self._require(
            "temperature",
            t == 0 or SMALLEST_TEMPERATURE <= t < math.inf,
            f"0 for greedy decoding, or a finite number from {SMALLEST_TEMPERATURE:g}",
        )
        self._require("top_k", self.top_k >= 0, "0 to switch it off, or a positive integer")
        self._require("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1; 1 switches it off")
        self._require("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1; 0 switches it off")
        self._require(
            "repetition_penalty",
            SMALLEST_REPETITION_PENALTY <= self.repetition_penalty <= LARGEST_REPETITION_PENALTY,
            f"a number from {SMALLEST_REPETITION_PENALTY:g} to {LARGEST_REPETITION_PENALTY:g}; 1 switches it off",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, -2 <= getattr(self, name) <= 2, "a number from -2 to 2; 0 switches it off")
        self._require("seed", 0 <= self.seed <= LARGEST_SEED, "an integer from 0 to 2^64 - 1")
        self._validate_ids(vocab_size)

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        """A comparison with NaN is false, so that `holds` written as a range refuses it too."""
        if not holds:
            raise SamplingError(name, repr(getattr(self, name)), allowed)

    def _validate_ids(self, vocab_size: int | None) -> None:
        end = math.inf if vocab_size is None else vocab_size
        ids = "ids of the vocabulary" if vocab_size is None else f"ids from 0 to {vocab_size - 1}"
        for token, bias in self.logit_bias.items():
            if not 0 <= token < end:
                raise SamplingError("logit_bias", f"given for id {token}", ids)
            if not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
                allowed = f"numbers from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}; banned_ids forbids an id"
                raise SamplingError("logit_bias", f"{bias:g} for id {token}", allowed)
        for token in self.banned_ids:
            if not 0 <= token < end:
                raise SamplingError("banned_ids", f"given id {token}", ids)
        if vocab_size is not None and len(set(self.banned_ids)) >= vocab_size:
            raise SamplingError("banned_ids", "the whole vocabulary", "fewer ids, so that a token remains")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= end:
            raise SamplingError("top_logprobs", repr(self.top_logprobs), "0 or more, at most the vocabulary's size")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken (T = 0); truncation and noise then change nothing."""
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def adjusts(self) -> bool:
        """Whether single logits change before the division by the temperature."""
        return self.penalizes or bool(self.logit_bias) or bool(self.banned_ids)

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are cut away."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
