"""What the host writes arrives on the device, copied or fetched, whole or in parts."""

import numpy as np
import pytest
import torch

from specla.kernels.gpu.upload import Upload


@pytest.mark.parametrize("words", [1, 7, 1024, 5003])
@pytest.mark.parametrize("way", ["send", "fetch"])
def test_all_words_arrive_and_nothing_behind_them(words, way, device):
    upload = Upload(words, device)
    for first in (1, 100_000):
        upload.words()[:] = np.arange(first, first + words)
        getattr(upload, way)()
        assert upload.buffer.tolist() == list(range(first, first + words))


@pytest.mark.parametrize("way", ["send", "fetch"])
def test_the_whole_brings_its_parts(way, device):
    whole = Upload(Upload.room(3, 6), device)
    first, second = Upload(3, device, within=whole), Upload(6, device, within=whole)
    first.words()[:], second.words()[:] = 5, 9
    getattr(first, way)()  # does nothing
    assert not whole.buffer.any()
    getattr(whole, way)()
    assert first.buffer.tolist() == [5] * 3
    assert second.buffer.tolist() == [9] * 6


@pytest.mark.gpu
def test_a_captured_fetch_takes_what_the_host_wrote_last(device):
    upload = Upload(2050, device)
    upload.fetch()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        upload.fetch()
    for value in range(1, 6):
        upload.words()[:] = value
        graph.replay()
        queued = torch.cuda.Event()
        queued.record()
        upload.sent(queued.synchronize)
        assert bool((upload.buffer == value).all())
