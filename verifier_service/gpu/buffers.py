"""Everything of fixed address that the launches of one bucket's passes read and write."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specla.kernels.gpu.adjusting import NO_CHANGES, Changes, LogitEntries
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket, PassBatch
from specla.kernels.gpu.product import product_parts
from specla.kernels.gpu.sampler_rows import MOST_SCORED, SamplerRows
from specla.kernels.gpu.serial import SerialWorkspace
from specla.kernels.gpu.upload import Upload
from specla.kernels.jit import compiled
from specla.kernels.sampling import RowSampling, SessionSampling
from specla.verifier_service.gpu.arena import Layout
from specla.verifier_service.gpu.weights import InputWidths
from specla.verifier_service.targets.config import GatedDeltaNetConfig

MOST_ENTRIES = 1 << 17
"""Length of all sessions' lists of changed logits in one launch: 2.5 MiB here and there."""
_NOT_THERE = -(1 << 31)  # neither a token nor an error
_APART = Upload.room(1)  # words: numbers that are aligned are all alike to a compiler


class Activations(NamedTuple):
    """What lives during one pass, over the bucket's R row places."""

    stream: Tensor
    """float32 [R, hidden], the residual stream."""
    normed: Tensor
    """model dtype [R, hidden], what goes into a projection."""
    inputs: Tensor
    """model dtype [R, ...], the mixer's projections (see `InputWidths`)."""
    rows: LayerRows
    """The recurrence's inputs."""
    o: Tensor
    """float32 [R, HV, V], its outputs."""
    mixed: Tensor
    """model dtype [R, HV V], normed and gated."""
    activated: Tensor
    """model dtype [R, M], within the MLP."""
    from_mixer: Tensor
    """float32 [P, R, hidden], what the mixer adds to the stream, in as many parts as its product's sums are best cut
    into; P depends on the model's shape alone."""
    from_mlp: Tensor
    """The same of the MLP, at the same place."""
    kept: Tensor
    """float32, the serial kernels' workspace (see `SerialWorkspace`)."""
    scores: Tensor
    """float32 [S, vocab], the sampler's scratch, where everything above has been: nothing of it is needed by then."""
    final: Tensor
    """model dtype [R, hidden], the final norm's output."""
    logits: Tensor
    """float32 [S, vocab], of S rows at a time: those of a pass of more rows are gone once they have sampled."""
    hidden: Tensor
    """float32 [kept layers, R, hidden], the stream after each layer that somebody asks for."""

    @classmethod
    def laid_out(
        cls,
        config: GatedDeltaNetConfig,
        dtype: torch.dtype,
        bucket: Bucket,
        layers: int,
        layout: Layout,
        *,
        serial: bool,
    ) -> Activations:
        """In an arena; `layers` is how many layers' streams are kept, `serial` whether a serial kernel runs."""
        R, hidden, single = bucket.rows, config.hidden_size, torch.float32
        heads, key_width = config.num_heads, config.head_dim
        values = (config.value_heads, config.head_v_dim)
        final = layout.take(R, hidden, dtype=dtype)
        streams = layout.take(layers, R, hidden, dtype=single)
        late = layout.beside()
        stream = layout.take(R, hidden, dtype=single)
        normed = layout.take(R, hidden, dtype=dtype)
        inputs = layout.take(R, InputWidths.of(config).total, dtype=dtype)
        rows = LayerRows(
            layout.take(R, heads, key_width, dtype=dtype),
            layout.take(R, heads, key_width, dtype=dtype),
            layout.take(R, *values, dtype=dtype),
            layout.take(R, values[0], dtype=single),
            layout.take(R, values[0], dtype=single),
        )
        o = layout.take(R, *values, dtype=single)
        mixed = layout.take(R, config.value_dim, dtype=dtype)
        activated = layout.take(R, config.mlp_dim, dtype=dtype)
        of_mixer, of_mlp = (product_parts(hidden, width) for width in (config.value_dim, config.mlp_dim))
        parts = layout.take(max(of_mixer, of_mlp), R, hidden, dtype=single)
        from_mixer, from_mlp = parts[:of_mixer], parts[:of_mlp]  # one has been added before the other is written
        shape, _ = SerialWorkspace.shapes(bucket, values[0], key_width, values[1])
        kept = layout.take(*shape, dtype=single) if serial else layout.take(0, dtype=single)
        logits, scores = (late.take(min(R, MOST_SCORED), config.vocab_size, dtype=single) for _ in range(2))
        layout.nbytes = max(layout.nbytes, late.nbytes)
        return cls(
            stream, normed, inputs, rows, o, mixed, activated, from_mixer, from_mlp,
            kept, scores, final, logits, streams,
        )  # fmt: skip


class SampledPart(NamedTuple):
    """Rows that have logits and sample at a time."""

    rows: slice
    counted: Tensor
    """int32 [1], how many of them count."""
    logits: Tensor
    """float32 [rows, vocab]."""


class PassBuffers:
    """A bucket's inputs, activations and results.

    Attributes:
        bucket: the sizes.
        layers: whose streams are kept, in the order of `activations.hidden`.
        serial: whether a serial kernel may run.
        activations: what lives during a pass.
        upload: sends all inputs at once: `batch`, `tokens` and `sampler`.
        batch: sessions, trees, pending factors.
        tokens: int32 [R], the rows' own tokens; `put_tokens` fills it.
        parts: all rows, as many at a time as have room for their logits.
        sampler: how rows sample.
        entries: which single logits change before; all buckets share them.
        sampled, errors: int32 [R], results, in the host's memory: the last kernel writes them there.
        workspace: of the serial kernels.
    """

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        dtype: torch.dtype,
        bucket: Bucket,
        arena: Tensor,
        entries: LogitEntries,
        *,
        layers: Sequence[int] = (),
        serial: bool = True,
    ) -> None:
        """For a model and a bucket, within the memory that all buckets share.

        Args:
            config: the model's shape.
            dtype: of its matrices and activations.
            bucket: the sizes.
            arena: uint8 [bytes], at least `nbytes`.
            entries: shared by all buckets.
            layers: whose streams are kept.
            serial: whether a serial kernel may run.
        """
        device, R = arena.device, bucket.rows
        self.bucket, self.layers, self.serial = bucket, tuple(layers), serial
        self.activations = Activations.laid_out(config, dtype, bucket, len(layers), Layout(arena), serial=serial)
        logits = self.activations.logits
        firsts = range(0, R, len(logits))
        words = bucket.buffer_words, R, _APART * len(firsts), SamplerRows.words(R)
        self.upload = Upload(Upload.room(*words), device)
        self.batch = PassBatch(bucket, device, within=self.upload)
        self._tokens = Upload(R, device, within=self.upload)
        self.tokens = self._tokens.buffer
        self._counts = Upload(_APART * len(firsts), device, within=self.upload)
        self.parts = [
            SampledPart(slice(first, first + len(logits)), self._counts.buffer[at : at + 1], logits[: R - first])
            for first, at in zip(firsts, range(0, _APART * len(firsts), _APART), strict=True)
        ]
        self.sampler = SamplerRows(R, config.vocab_size, device, scores=self.activations.scores, within=self.upload)
        self.entries = entries.of(R)
        results = torch.zeros(2, R, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.sampled, self.errors = results
        self._results: NDArray[np.int32] = results.numpy()
        self._used, self._found = 0, self._results[:, :0]
        self._sessions: Sequence[SessionSampling] = ()
        self._adjusts = False
        self._row_tokens = self._tokens.words().data
        _, arrived = SerialWorkspace.shapes(bucket, config.value_heads, config.head_dim, config.head_v_dim)
        self.workspace = SerialWorkspace(self.activations.kept, torch.zeros(arrived, dtype=torch.int32, device=device))

    @staticmethod
    def nbytes(
        config: GatedDeltaNetConfig, dtype: torch.dtype, bucket: Bucket, *, layers: int = 0, serial: bool = True
    ) -> int:
        """Bytes of the arena that a bucket needs."""
        layout = Layout(None)
        Activations.laid_out(config, dtype, bucket, layers, layout, serial=serial)
        return layout.nbytes

    @property
    def counted(self) -> Tensor:
        """int32 [1], how many rows count."""
        return self.batch.row_start[-1:]

    def put_tokens(self, tokens: Sequence[int]) -> None:
        """The rows' tokens, first rows first; places beyond them keep what they held."""
        count = len(tokens)
        self.upload.words()  # waits
        self._row_tokens[:count] = array("i", tokens)  # several times as fast as NumPy's own way from a list
        if count != self._used:
            self._used, self._found, counts = count, self._results[:, :count], self._counts.words()
            for i, part in enumerate(self.parts):
                counts[_APART * i] = max(0, min(count - part.rows.start, len(part.logits)))

    def put_sampling(self, sampling: RowSampling) -> Changes:
        """How the rows sample; returns which logits change before (see `LogitEntries.put`)."""
        self.sampler.fill(sampling)
        if sampling.sessions is not self._sessions:  # a list is not changed in place
            self._sessions = sampling.sessions
            self._adjusts = any([session.adjusts for session in sampling.sessions])
        return self.entries.changes_of(sampling) if self._adjusts else NO_CHANGES

    def expect_results(self) -> None:
        """Marks the results of all rows that have tokens as not there."""
        self._found.fill(_NOT_THERE)

    def have_results(self) -> bool:
        """Whether all rows' results are there. Each is one aligned word that the device writes once."""
        there: bool = _are_there(self._found)
        return there

    def results(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Tokens and errors of all rows that have tokens; whoever calls has waited for the pass.

        The errors are a view, valid until the next pass.
        """
        return self._found[0].astype(np.int64), self._found[1]


@compiled
def _are_there(results: Any) -> bool:
    """One look: compiled code that looked again and again could keep what it saw first."""
    for kind in range(results.shape[0]):
        for row in range(results.shape[1]):
            if results[kind, row] == _NOT_THERE:
                return False
    return True
