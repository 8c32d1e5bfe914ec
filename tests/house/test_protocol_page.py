"""docs/protocol.md says what the code does: its test vectors, its errors, its example of counting."""

import re

import numpy as np
import pytest
from product_tree import ROOT

from specla.kernels.philox import gumbel_noise_at, noise_words
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
