"""docs/protocol.md says what the code does: its test vectors, its errors, its example of counting."""

import re

import numpy as np
import pytest
from product_tree import ROOT

from specla.kernels.philox import gumbel_noise_at, noise_words
from specla.kernels.sampling import RowSampling, SamplingParams, SessionSampling, sample
from specla.rpc import errors
from specla.v1 import verifier_pb2

PAGE = (ROOT / "docs/protocol.md").read_text()
_VECTOR = re.compile(r"^\| (0x[0-9a-f]{16}) \| (\d+) \| (\d+) \| (0x[0-9a-f]{8}) \| (\S+) \| (0x[0-9a-f]{8}) \|$", re.M)


def test_there_are_vectors() -> None:
    assert len(_VECTOR.findall(PAGE)) > 10


@pytest.mark.parametrize(("seed", "position", "token", "word", "noise", "bits"), _VECTOR.findall(PAGE))
def test_vector(seed: str, position: str, token: str, word: str, noise: str, bits: str) -> None:
    ids = np.array([int(token)])
    assert int(noise_words(int(seed, 16), int(position), int(token) + 1)[-1]) == int(word, 16)
    got = gumbel_noise_at(int(seed, 16), int(position), ids)
    assert got.dtype == np.float32
    assert int(got.view(np.uint32)[0]) == int(bits, 16)
    assert float(np.float32(noise)) == float(got[0])


_DRAWN = re.compile(r"^\| ([\d.]+) \| (\d+) \| ((?:\d+ )+\d+) \|$", re.M)


@pytest.mark.parametrize(("temperature", "seed", "tokens"), _DRAWN.findall(PAGE))
def test_tokens_drawn(temperature: str, seed: str, tokens: str) -> None:
    (listed,) = re.findall(r"from the eight logits\s+`([^`]+)`", PAGE)
    logits = np.array([float(number) for number in listed.split(",")], dtype=np.float32)
    params = SamplingParams(temperature=float(temperature), seed=int(seed))
    wanted = [int(token) for token in tokens.split()]
    session = SessionSampling(params, len(logits))
    rows = RowSampling([session], [0] * len(wanted), list(range(len(wanted))))
    assert sample(np.tile(logits, (len(wanted), 1)), rows).tokens.tolist() == wanted


def test_every_error_is_in_the_table() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SpeclaError)]
    wanted = {(kind.reason, kind.code) for kind in kinds if kind is not errors.SpeclaError}
    assert set(re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| ", PAGE, re.M)) == wanted


def test_every_outcome_and_command_is_named() -> None:
    outcomes = [
        name.removeprefix("OUTCOME_") for name in verifier_pb2.Outcome.DESCRIPTOR.values_by_name if "UNSPEC" not in name
    ]
    fields = verifier_pb2.SessionCommand.DESCRIPTOR.oneofs_by_name["command"].fields
    commands = [field.message_type.name for field in fields if field.message_type is not None]
    assert len(commands) == len(fields)
    for name in [*outcomes, *commands]:
        assert re.search(rf"^\| `{name}[`{{]", PAGE, re.M), name
