"""What a GPU alone can launch is at least called with every parameter of its kernel, tensors by their names."""

import inspect
from typing import Any

import pytest
import torch
import triton
from gpu_layers import Dims, make_layer
from tree_cases import chain

from specla.kernels.gpu import chunk_scan, held, held_blocks, serial_batch, serial_split, streamed
from specla.kernels.gpu.chunk_delta import ChunkWorkspace
from specla.kernels.gpu.factorised import verify_factorised
from specla.kernels.gpu.held import HeldTile
from specla.kernels.gpu.layer_rows import LayerRows
from specla.kernels.gpu.pass_batch import Bucket
from specla.kernels.gpu.serial import SerialWorkspace, verify_serial
from specla.kernels.gpu.streamed import StreamedTile

OPTIONS = {"num_warps", "maxnreg", "launch_pdl"}


class Recorder:
    """Stands in for a kernel: binds a launch's arguments to the kernel's parameters."""

    def __init__(self, kernel: Any) -> None:
        self.names = list(inspect.signature(kernel.fn).parameters)
        self.grid: tuple[int, ...] = ()
        self.bound: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> "Recorder":
        self.grid = grid
        return self

    def __call__(self, *tensors: Any, **named: Any) -> None:
        assert set(named) - set(self.names) <= OPTIONS
        self.bound = dict(zip(self.names, tensors, strict=False))
        assert not set(self.bound) & set(named)
        self.bound |= {name: value for name, value in named.items() if name not in OPTIONS}
        assert set(self.bound) == set(self.names)


@pytest.mark.parametrize(
    ("module", "name", "tile", "tree_rows", "grid"),
    [
        (held, "verify_held_kernel", HeldTile(2), 9, (8, 2, 2)),
        (held_blocks, "verify_blocks_kernel", HeldTile(2), 17, (8, 2, 2)),
        (streamed, "verify_streamed_kernel", StreamedTile(32, 3), 9, (2, 2, 2)),
        (serial_split, "verify_split_kernel", None, 9, (8, 2, 6)),
    ],
)
def test_every_parameter_is_given(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, tile: Any, tree_rows: int, grid: tuple[int, ...]
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    recorder = Recorder(getattr(module, name))
    monkeypatch.setattr(module, name, recorder)
    bucket = Bucket(sessions=2, rows=20, tree_rows=tree_rows, pending=4, groups=3)
    layer = make_layer(Dims(1, 2, 64, 128, torch.bfloat16), [chain(3)], torch.device("cpu"), bucket=bucket)
    rows, batch, pool = layer.rows, layer.batch, layer.pool
    if tile is None:
        workspace = SerialWorkspace.empty(bucket, 2, 64, 128, "cpu")
        verify_serial(rows, layer.state, pool, batch, layer.o, workspace)
        assert recorder.bound["p_kept"] is workspace.kept
        assert recorder.bound["p_schedule"] is batch.schedule
        assert recorder.bound["p_groups"] is batch.groups
    else:
        verify_factorised(rows, layer.state, pool, batch, layer.o, tile)
        assert recorder.bound["p_ancestors"] is batch.ancestors
        assert recorder.bound["p_depth"] is batch.depth
    assert recorder.grid == grid
    for parameter, tensor in {
        "p_q": rows.q,
        "p_beta": rows.beta,
        "p_state": layer.state,
        "p_pool_k": pool.k,
        "p_pool_g": pool.g,
        "p_o": layer.o,
        "p_slot": batch.slot,
        "p_row_start": batch.row_start,
        "p_pending_len": batch.pending_len,
        "p_write_state": batch.write_state,
        "p_pending": batch.pending,
        "p_pool_row": batch.pool_row,
    }.items():
        assert recorder.bound[parameter] is tensor, parameter
    sizes = {name: recorder.bound[name] for name in ("POOL", "PENDING", "H", "HV", "K", "V")}
    assert sizes == {"POOL": pool.k.shape[1], "PENDING": 4, "H": 1, "HV": 2, "K": 64, "V": 128}
    assert recorder.bound["OVERLAP"] == 0


@pytest.mark.parametrize(("sessions", "programs", "units"), [(34, 272, 272), (60, 396, 480)])
def test_batches_take_the_form_for_many_programs(
    monkeypatch: pytest.MonkeyPatch, sessions: int, programs: int, units: int
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    recorder = Recorder(serial_batch.verify_batch_kernel)
    monkeypatch.setattr(serial_batch, "verify_batch_kernel", recorder)
    bucket = Bucket(sessions=sessions, rows=100, tree_rows=32, pending=4)
    layer = make_layer(Dims(1, 2, 64, 128, torch.bfloat16), [chain(3)], torch.device("cpu"), bucket=bucket)
    workspace = SerialWorkspace.empty(bucket, 2, 64, 128, "cpu")
    assert workspace.kept.shape[0] == programs, "places are a program's, not a session's"
    verify_serial(layer.rows, layer.state, layer.pool, layer.batch, layer.o, workspace)
    assert recorder.grid == (programs,)
    assert recorder.bound["units"] == units
    assert recorder.bound["p_kept"] is workspace.kept
    assert recorder.bound["p_k"] is layer.rows.k
    assert recorder.bound["p_schedule"] is layer.batch.schedule


@pytest.mark.parametrize(
    ("tile", "rows", "chunks", "kept", "warps"),
    [
        (HeldTile(4), 64, 1, 1, 4),
        (HeldTile(4), 65, 2, 1, 4),
        (HeldTile(4), 81, 2, 2, 4),
        (HeldTile(2), 129, 5, 4, 2),
        (HeldTile(4), 32, 1, 1, 2),
    ],
)
def test_chunks_of_a_bucket(
    monkeypatch: pytest.MonkeyPatch, tile: HeldTile, rows: int, chunks: int, kept: int, warps: int
) -> None:
    """Of one block a warp; a last chunk of one block needs no place for its keys, and no warp is without a block."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    recorder = Recorder(held_blocks.verify_blocks_kernel)
    monkeypatch.setattr(held_blocks, "verify_blocks_kernel", recorder)
    bucket = Bucket(sessions=1, rows=rows, tree_rows=rows)
    layer = make_layer(Dims(1, 1, 64, 16, torch.bfloat16), [chain(3)], torch.device("cpu"), bucket=bucket)
    verify_factorised(layer.rows, layer.state, layer.pool, layer.batch, layer.o, tile)
    assert [recorder.bound[name] for name in ("CHUNKS", "KEPT", "W")] == [chunks, kept, warps]
    with pytest.raises(ValueError, match="2, 4 warps"):
        verify_factorised(layer.rows, layer.state, layer.pool, layer.batch, layer.o, HeldTile(1))


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_walk_through_chunks_is_given_every_parameter(monkeypatch: pytest.MonkeyPatch, overlap: int) -> None:
    recorder = Recorder(chunk_scan.chunk_scan_streamed_kernel)
    monkeypatch.setattr(chunk_scan, "chunk_scan_streamed_kernel", recorder)
    monkeypatch.setattr(chunk_scan, "_multiprocessors", lambda _: 132)
    rows = LayerRows.empty(128, 2, 4, 256, 64, torch.bfloat16, "cpu")
    workspace = ChunkWorkspace.empty(128, 4, torch.bfloat16, "cpu")
    states, texts = torch.zeros(3, 4, 192, 64), torch.zeros(2, 3, dtype=torch.int32)
    o = torch.empty_like(rows.v)
    chunk_scan.launch_scan(rows.q, rows.k, rows.v, *workspace, states, o, texts, overlap)
    assert recorder.grid == (4, 4, 2)
    assert recorder.bound["p_texts"] is texts
    assert recorder.bound["p_decay"] is workspace.decay
    assert recorder.bound["OVERLAP"] == overlap
    sizes = {name: recorder.bound[name] for name in ("H", "HV", "K", "KEYS", "V", "BV", "C", "LOWER", "STAGES")}
    assert sizes == {"H": 2, "HV": 4, "K": 256, "KEYS": 192, "V": 64, "BV": 16, "C": 64, "LOWER": 512, "STAGES": 2}
