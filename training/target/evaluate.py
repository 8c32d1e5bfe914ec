"""`specla train eval`: what a finished target can do, measured on held-out documents, beside a 5-gram model and xz."""

import ast
import json
import lzma
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn import functional as F  # noqa: N812 (the field's name for it)

from specla.training.data.documents import Document, read_documents
from specla.training.data.held_out import FunctionProbe, functions
from specla.training.data.shards import read_shard
from specla.training.data.sources import DOMAINS
from specla.training.target.decode import END_OF_TEXT_ID, generate
from specla.training.target.model import TargetModel, boundaries
from specla.training.target.ngram import ORDER, NGram

FUNCTIONS, SUMS = 200, 100
SAMPLE_PROMPTS = (
    "It was a cold morning in November, and",
    "The history of the city begins with",
    "To install the program, first",
    'def moving_average(values, window):\n    """Return the moving average of a list of numbers."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "Question: Mia has 7 boxes of 12 pencils each. Mia gives away 30 pencils. How many pencils are left?\nAnswer:",
)

Tokens = NDArray[np.uint16]


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """`[vocabulary]`: how many bytes of text each token stands for; the end of text stands for none.

    In a byte-level vocabulary every character of a token's written form is one byte.
    """
    lengths = [len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.get_vocab_size())]
    lengths[END_OF_TEXT_ID] = 0
    return np.array(lengths, np.int64)


@torch.no_grad()
def model_nats(model: TargetModel, tokens: Tokens, *, length: int = 1024, batch: int = 8) -> NDArray[np.float64]:
    """`[tokens - 1]` nats a token, in windows of `length` that begin with an empty state, as in training."""
    device = next(model.parameters()).device
    nats = []
    starts = list(range(0, len(tokens) - 1, length))
    full = [s for s in starts if s + length + 1 <= len(tokens)]
    groups = [full[i : i + batch] for i in range(0, len(full), batch)] + [[s] for s in starts[len(full) :]]
    for group in groups:
        rows = np.stack([tokens[s : s + length + 1] for s in group]).astype(np.int64)
        ids = torch.from_numpy(rows).to(device)
        logits = model(ids[:, :-1], boundaries(ids[:, :-1], END_OF_TEXT_ID, model.shape.conv_size))
        nats.append(F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none").cpu())
    return torch.cat(nats).double().numpy()


def bits_per_byte(nats: NDArray[np.float64], tokens: Tokens, sizes: NDArray[np.int64]) -> float:
    """Bits a byte over the last `len(nats)` tokens."""
    return float(nats.sum() / math.log(2) / sizes[tokens[-len(nats) :].astype(np.int64)].sum())


def body_end(continuation: str) -> int | None:
    """The number of the first line that is not indented, where the body has ended; None while it goes on."""
    lines = continuation.split("\n")
    return next((i for i, line in enumerate(lines) if line.strip() and not line.startswith((" ", "\t"))), None)


def body_parses(prompt: str, continuation: str) -> bool:
    """Whether a function's head and the indented lines that follow it are Python, and the body is not empty.

    The body ends before the first line that is not indented. A body cut off by the token limit loses its last line.
    """
    lines = continuation.split("\n")
    ended = body_end(continuation)
    body = lines[:ended] if ended is not None else lines[:-1]
    if not any(line.strip() for line in body):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(prompt + "\n".join(body))
    except (SyntaxError, ValueError):
        return False
    return True


def evaluate_model(
    model: TargetModel, tokenizer: Tokenizer, documents: list[Document], tokens: Path, *, test_tokens: int, seed: int
) -> dict[str, Any]:
    """Bits a byte a domain, parse share, worked sums, samples."""
    sizes = token_bytes(tokenizer)
    result: dict[str, Any] = {"bits_per_byte": {}}
    for domain in DOMAINS:
        stream = np.asarray(read_shard(tokens, domain, "test"))[:test_tokens]
        result["bits_per_byte"][domain] = bits_per_byte(model_nats(model, stream), stream, sizes)
        result.setdefault("test_tokens", {})[domain] = len(stream)
    probes = functions(documents, count=FUNCTIONS, seed=seed)
    result["functions"] = _functions(model, tokenizer, probes)
    result["worked_sums"] = _sums(model, tokenizer, documents)
    result["samples"] = _samples(model, tokenizer)
    return result


def _continue(model: TargetModel, tokenizer: Tokenizer, texts: Sequence[str], **how: Any) -> list[str]:
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    return [tokenizer.decode(ids) for ids in generate(model, prompts, **how)]


def _functions(model: TargetModel, tokenizer: Tokenizer, probes: list[FunctionProbe]) -> dict[str, Any]:
    shares = {}
    for temperature in (0.0, 0.7):
        texts = _continue(
            model,
            tokenizer,
            [p.prompt for p in probes],
            new=256,
            temperature=temperature,
            enough=lambda ids: body_end(tokenizer.decode(ids)) is not None,
        )
        good = sum(body_parses(p.prompt, text) for p, text in zip(probes, texts, strict=True))
        shares[f"parses_at_temperature_{temperature}"] = good / max(len(probes), 1)
    own = sum(body_parses(p.prompt, p.body + "\nend") for p in probes) / max(len(probes), 1)
    return {"count": len(probes), **shares, "parses_as_written_by_authors": own}


def _sums(model: TargetModel, tokenizer: Tokenizer, documents: Iterable[Document]) -> dict[str, Any]:
    held_out = [d.text for d in documents if d.source == "worked-sums" and d.split == "test"][:SUMS]
    halves = [text.split("\nAnswer:") for text in held_out]
    texts = _continue(model, tokenizer, [question + "\nAnswer:" for question, _ in halves], new=200)
    pattern = re.compile(r"The answer is (.+)\.\s*$")
    shaped = [pattern.search(text.strip()) for text in texts]
    wanted = [pattern.search(answer.strip()) for _, answer in halves]
    right = sum(bool(a and b and a.group(1) == b.group(1)) for a, b in zip(shaped, wanted, strict=True))
    count = max(len(halves), 1)
    return {"count": len(halves), "right_shape": sum(map(bool, shaped)) / count, "right_answer": right / count}


def _samples(model: TargetModel, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    samples = []
    for temperature in (0.0, 0.7):
        texts = _continue(model, tokenizer, SAMPLE_PROMPTS, new=120, temperature=temperature)
        for prompt, text in zip(SAMPLE_PROMPTS, texts, strict=True):
            samples.append({"prompt": prompt, "temperature": temperature, "text": text})
    return samples


def evaluate_baselines(tokenizer: Tokenizer, tokens: Path, *, test_tokens: int) -> dict[str, Any]:
    """Bits a byte on the same test tokens: a 5-gram model of the same domain's training stream, and xz alone."""
    sizes = token_bytes(tokenizer)
    five, squeezed = {}, {}
    for domain in DOMAINS:
        stream = np.asarray(read_shard(tokens, domain, "test"))[:test_tokens]
        grams = NGram(np.asarray(read_shard(tokens, domain, "train")), tokenizer.get_vocab_size(), ORDER)
        five[domain] = bits_per_byte(grams.nats(stream), stream, sizes)
        text = tokenizer.decode(stream.tolist(), skip_special_tokens=True).encode()
        squeezed[domain] = 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
    return {"five_gram_bits_per_byte": five, "xz_bits_per_byte": squeezed}


def held_out_documents(data: Path) -> list[Document]:
    """The documents that training never saw."""
    return [document for document in read_documents(data / "held_out.jsonl") if document.split != "train"]


def merge_results(path: Path, result: dict[str, Any]) -> None:
    """Add results to a JSON file, keeping what else it holds."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known | result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
