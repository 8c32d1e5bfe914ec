"""Which rows of a chunk are whose, as the device is told, and the rows that are kept for the host."""

import pytest
import torch

from specla.kernels.gpu.chunk_batch import ChunkBatch, ChunkInputs, ChunkText
from specla.kernels.gpu.keep_rows import keep_rows

POISON = 7777.0


def test_texts_begin_with_blocks_and_nothing_of_a_former_chunk_remains(device):
    inputs = ChunkInputs(320, 3, 4, 2, device)
    whole = ChunkText(0, range(1, 321), [1, 2, 3], [4, 5, 6], {0: 11, 1: 12})
    texts = [
        ChunkText(7, range(100, 165), [-1, -1, 5], [1, 2, 3], {}),
        ChunkText(2, [9, 8], [3, 4, 5], [6, 7], {1: 99}),
    ]
    for _ in range(3):  # each side of the host, and the first one again
        inputs.put([whole], 320)
        assert inputs.batch.owner.tolist() == [0] * 5
        assert inputs.streams.tolist() == [[11, 0, 0], [12, 0, 0]]
        assert inputs.batch.tokens.tolist() == list(range(1, 321))
        inputs.put(texts, 256)
        batch = inputs.batch.first(256, 3)
        assert batch.rows.tolist() == [130]
        assert batch.owner.tolist() == [0, 0, 1, -1]
        assert batch.texts.tolist() == [[0, 65, 7], [128, 2, 2], [0, 0, 0]]
        assert batch.history[:2].tolist() == [[-1, -1, 5], [3, 4, 5]]
        assert batch.places[:2].tolist() == [[1, 2, 3], [6, 7, -1]]
        assert batch.tokens[:65].tolist() == list(range(100, 165))
        assert batch.tokens[65:192].tolist() == [0] * 63 + [9, 8] + [0] * 62
        assert inputs.streams.tolist() == [[0, 0, 0], [0, 99, 0]]
    inputs.put([], 64)
    assert inputs.batch.rows.tolist() == [0]
    assert set(inputs.batch.owner.tolist()) == {-1}


@pytest.mark.parametrize(("width", "dtype"), [(48, torch.float32), (2560, torch.float32)])
def test_rows_go_where_their_text_says(width, dtype, device):
    check_rows(width, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_go_to_the_host(dtype, device):
    check_rows(2048, dtype, device)


def check_rows(width, dtype, device):
    """Three texts, the second of which nobody asks for; the host's memory is written through its address."""
    inputs, counts = ChunkInputs(320, 4, 1, 2, device), [65, 3, 64]
    memory = [torch.full((n + 1, width), POISON, pin_memory=torch.device(device).type == "cuda") for n in counts]
    texts = [ChunkText(i, [0] * n, [], [], {1: memory[i].data_ptr()} if i != 1 else {}) for i, n in enumerate(counts)]
    inputs.put(texts, 320)
    x = torch.randn(320, width, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    keep_rows(torch.full_like(x, POISON), inputs.streams[0], inputs.batch)  # nobody asks for this one
    keep_rows(x, inputs.streams[1], inputs.batch)
    if x.is_cuda:
        torch.cuda.synchronize()
    assert torch.equal(memory[0][:65], x[:65].float().cpu())
    assert torch.equal(memory[2][:64], x[192:256].float().cpu())
    assert all(bool((rows[n:] == POISON).all()) for rows, n in zip(memory, counts, strict=True))
    assert bool((memory[1] == POISON).all())


def test_what_does_not_fit_is_refused(device):
    inputs, x = ChunkInputs(128, 2, 4, 1, device), torch.zeros(128, 16, device=device)
    for places in (inputs.streams[0].int(), inputs.streams[0][:1]):
        with pytest.raises(ValueError, match=r"places is .*: give int64 \[2\]"):
            keep_rows(x, places, inputs.batch)
    with pytest.raises(ValueError, match=r"tokens is torch.int32 \[128\] .* give int32 \[64\]"):
        keep_rows(x[:64], inputs.streams[0], inputs.batch)
    with pytest.raises(ValueError, match="0 rows: give a multiple of 64"):
        ChunkBatch(*(part[:0] for part in inputs.batch)).check(0, x.device)
