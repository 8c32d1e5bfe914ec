"""The limits that docs/reliability.md names are the defaults of the configurations."""

import ast
import re
from dataclasses import fields

import pytest
from product_tree import ROOT

from specla.client.config import CoordinatorConfig
from specla.client.coordinator.generation import _MAX_SETBACKS
from specla.drafter_service.config import DrafterConfig
from specla.rpc.channel import UNARY_DEADLINE_S
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.draft_wait import ALLOWED_PASSES, ALLOWED_S, ALLOWED_SHARE
from specla.verifier_service.speed_guard import PROBE_EVERY

PAGE = (ROOT / "docs/reliability.md").read_text()
CONFIGS = {kind.__name__: kind for kind in (VerifierConfig, CoordinatorConfig, DrafterConfig)}
_ROW = re.compile(r"^\| `(\w+)` \| ([\d.]+) \| `(\w+)` \|$", re.M)


def test_there_are_limits() -> None:
    assert {config for _, _, config in _ROW.findall(PAGE)} == set(CONFIGS)


@pytest.mark.parametrize(("name", "value", "config"), _ROW.findall(PAGE))
def test_limit(name: str, value: str, config: str) -> None:
    defaults = {field.name: field.default for field in fields(CONFIGS[config])}
    assert defaults[name] == ast.literal_eval(value)


def test_figures_in_the_text() -> None:
    text = " ".join(PAGE.split())
    assert (
        f"{ALLOWED_SHARE:.0%} of decode time + {ALLOWED_PASSES:.0f} plain passes, {ALLOWED_S * 1000:.0f} ms at most"
        in text
    )
    assert f"again every {PROBE_EVERY} tokens" in text
    assert _MAX_SETBACKS == 3
    assert "A fourth loss in a row" in text
    assert f"Unary calls between the parts have {UNARY_DEADLINE_S:.0f} s" in text
