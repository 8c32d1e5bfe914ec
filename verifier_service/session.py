"""One generation held by a verifier: its tokens, its slot, and what its next pass must know."""

from collections.abc import Sequence

from specla.kernels.sampling import SessionSampling
from specla.kernels.sampling_params import SamplingParams
from specla.verifier_service.acceptance import Finish, Stopping
from specla.verifier_service.features import FeatureRing
from specla.verifier_service.state import PendingPath


class Session:
    """A generation. Made by `Engine.open`, changed by the engine alone.

    Attributes:
        session_id: as the coordinator chose it.
        slot: where its state lies, or None once released.
        prompt_len: tokens of the prompt.
        tokens: prompt and output, the bonus token of the last pass included; the last of them is the next pass's root.
        run_len: tokens whose effect is in the stored state or in `pending`: while decoding, all but the root.
        resumed_len: tokens up to here are replayed, not sampled.
        pending: the accepted path that the stored state does not hold yet.
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
        self.pending: PendingPath | None = None
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
