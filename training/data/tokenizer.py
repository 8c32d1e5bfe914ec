"""The byte-level BPE tokenizer: trained on the corpus, digits apart, one special token that ends a document."""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specla.training.data.documents import Document

END_OF_TEXT = "<|endoftext|>"
# Words with one blank or sign before them, single digits, runs of signs, line ends, runs of blanks.
SPLIT = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SAMPLE = {"prose": 26e6, "docs": 16e6, "code": 34e6, "maths": 4e6}  # characters of each domain that BPE sees


def train_tokenizer(documents: Iterable[Document], *, vocab_size: int, seed: int) -> Tokenizer:
    """Train a byte-level BPE on a sample of the training split.

    Args:
        documents: the corpus; held-out documents are left out.
        vocab_size: number of ids, the 256 bytes and the end-of-text token (id 0) included.
        seed: of the sample.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(documents, seed), trainer)
    return tokenizer


def _sample(documents: Iterable[Document], seed: int) -> Iterator[str]:
    texts = [(d.domain, d.text) for d in documents if d.split == "train"]
    random.Random(seed).shuffle(texts)
    left = dict(SAMPLE)
    for domain, text in texts:
        if left[domain] > 0:
            left[domain] -= len(text)
            yield text


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the tokenizer_config.json that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
