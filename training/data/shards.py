"""Token streams on disk: little-endian uint16, one file a domain and split, every document followed by end-of-text."""

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from specla.training.data.documents import Document
from specla.training.data.tokenizer import END_OF_TEXT

BATCH = 2000  # documents tokenised at once


def shard_path(folder: Path, domain: str, split: str) -> Path:
    """Where the stream of one domain and split lies."""
    return folder / f"{domain}.{split}.bin"


def write_shards(documents: Iterable[Document], tokenizer: Tokenizer, folder: Path, *, seed: int) -> dict[str, int]:
    """Tokenise documents into streams in a shuffled order; returns the number of tokens a source package.

    Raises:
        ValueError: the vocabulary does not fit into 16 bits.
    """
    if tokenizer.get_vocab_size() > 1 << 16:
        raise ValueError(f"{tokenizer.get_vocab_size()} token ids do not fit into 16 bits")
    folder.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END_OF_TEXT)
    groups: dict[Path, list[Document]] = {}
    for document in documents:
        groups.setdefault(shard_path(folder, document.domain, document.split), []).append(document)
    counts: dict[str, int] = {}
    for path, group in sorted(groups.items()):
        random.Random(seed).shuffle(group)
        with path.open("wb") as out:
            for start in range(0, len(group), BATCH):
                batch = group[start : start + BATCH]
                for document, encoding in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
                    ids = np.array([*encoding.ids, end], dtype="<u2")
                    counts[document.source] = counts.get(document.source, 0) + len(ids)
                    out.write(ids.tobytes())
    return counts


def read_shard(folder: Path, domain: str, split: str) -> NDArray[np.uint16]:
    """One stream, mapped into memory: `[tokens]` uint16.

    Raises:
        FileNotFoundError: no such stream; build the data first.
    """
    path = shard_path(folder, domain, split)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; run `specla data build` first")
    return np.memmap(path, dtype="<u2", mode="r")
