"""Everything of fixed address that the launches of one bucket's passes read and write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specla.kernels.gpu.adjusting import LogitEntries
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch
from specla.kernels.gpu.product import product_parts
from specla.kernels.gpu.sampler_rows import SamplerRows
from specla.kernels.gpu.serial import SerialWorkspace
from specla.kernels.gpu.upload import Upload
from specla.verifier_service.gpu.weights import GpuWeights, InputWidths

_ENTRIES_A_ROW = 4096  # distinct ids that one row's penalties may count


class PassBuffers:
    """A bucket's inputs, activations and results, over its R row places.

    Attributes:
        bucket: the sizes.
        batch: sessions, trees, pending factors.
        tokens: int32 [R], the rows' own tokens; `put_tokens` fills it.
        stream: float32 [R, hidden], the residual stream.
        normed: model dtype [R, hidden], what goes into a projection.
        inputs: model dtype [R, ...], the mixer's projections (see `InputWidths`).
        rows: the recurrence's inputs.
        o: float32 [R, HV, V], its outputs.
        mixed: model dtype [R, HV V], normed and gated.
        activated: model dtype [R, M], within the MLP.
        from_mixer, from_mlp: float32 [P, R, hidden], what a half of a block adds to the stream, in as many parts as
            its product's sums are best cut into; P depends on the model's shape alone.
        hidden: float32 [L, R, hidden], the stream after each layer, or None if nobody asks for it.
        final: model dtype [R, hidden], the final norm's output.
        logits: float32 [R, vocab].
        sampler, entries: how rows sample, and which single logits change before.
        sampled, errors: int32 [R], results.
    """

    def __init__(self, weights: GpuWeights, bucket: Bucket, *, features: bool = False) -> None:
        """Uninitialised, for a model and a bucket."""
        config, dtype, device, R = weights.config, weights.dtype, weights.device, bucket.rows
        heads, value_heads = config.num_heads, config.value_heads

        def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty(R, *shape, dtype=of, device=device)

        self.bucket = bucket
        self.batch = PassBatch(bucket, device)
        self._tokens = Upload(R, device)
        self.tokens = self._tokens.buffer
        self.stream = empty(config.hidden_size, of=torch.float32)
        self.normed, self.final = empty(config.hidden_size), empty(config.hidden_size)
        self.inputs = empty(InputWidths.of(config).total)
        self.rows = LayerRows.empty(R, heads, value_heads, config.head_dim, config.head_v_dim, dtype, device)
        self.o = empty(value_heads, config.head_v_dim, of=torch.float32)
        self.mixed = empty(config.value_dim)
        self.activated = empty(config.mlp_dim)
        self.from_mixer, self.from_mlp = (
            torch.empty(product_parts(config.hidden_size, width), R, config.hidden_size, device=device)
            for width in (config.value_dim, config.mlp_dim)
        )
        layers = config.num_hidden_layers
        self.hidden = torch.empty(layers, R, config.hidden_size, device=device) if features else None
        self.logits = empty(config.vocab_size, of=torch.float32)
        self.sampler = SamplerRows(R, config.vocab_size, device)
        self.entries = LogitEntries(R, config.vocab_size, min(config.vocab_size, _ENTRIES_A_ROW) * R, device)
        self.sampled, self.errors = (torch.zeros(R, dtype=torch.int32, device=device) for _ in range(2))
        self.workspace = SerialWorkspace.empty(bucket, value_heads, config.head_dim, config.head_v_dim, device)

    def put_tokens(self, tokens: Sequence[int]) -> None:
        """The rows' tokens, first rows first; places beyond them get token 0."""
        words = self._tokens.words()
        words.fill(0)
        words[: len(tokens)] = tokens
        self._tokens.send()
