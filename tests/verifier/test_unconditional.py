"""`drafting="unconditional"`: every draft is verified, so worthless ones prove that they leave no trace."""

from pathlib import Path

import pytest

from specla.client.local import Local
from specla.drafter_service.config import DrafterConfig
from specla.rpc.errors import InvalidRequestError
from specla.verifier_service.config import VerifierConfig
from specla.verifier_service.cost_model import Prospect, keep_all
from specla.verifier_service.draft_wait import DraftWait
from specla.verifier_service.speed_guard import SpeedGuard

PROMPT = "def total(values):\n    result = 0\n"


def test_all_that_fit_are_kept() -> None:
    tree = Prospect((-1, -1, 0, 2, 3), (0.1,) * 5, 3)
    chain = Prospect((-1, 0, 1), (0.1,) * 3, 9)
    assert keep_all([tree, chain], 100) == [[0, 1, 2, 3], [0, 1, 2]]  # depth 4 has no room in its text
    assert keep_all([tree, chain], 7) == [[0, 1, 2, 3], [0]]
    assert keep_all([tree, chain], 1) == [[], []]
    assert keep_all([Prospect((), (), 0)], 10) == [[]]


def test_waits_and_drafters_are_not_given_up() -> None:
    wait, guard = DraftWait(0.5, unconditional=True), SpeedGuard(unconditional=True)
    for turn in range(100):
        assert wait.until(float(turn), 0.01, 0.02) == turn + 0.5
        wait.settle(turn + 0.5, came=False, verified=0, tokens=1, pass_s=0.01)
        guard.record(turn, gained_s=0.0, cost_s=1.0, decode_s=0.01, plain_s=0.01)
    assert not guard.paused


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_worthless_drafts_are_verified_and_change_nothing(tiny_target: Path, temperature: float, device: str) -> None:
    config = VerifierConfig(
        target=tiny_target,
        device=device,  # type: ignore[arg-type]
        threads=1,
        drafting="unconditional",
        max_draft_wait_s=5.0,
    )
    with Local(verifier=config, drafters=[DrafterConfig(name="random", max_nodes=6)]) as local:
        texts = [
            local.generate(PROMPT, drafter=drafter, temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
            for drafter in ("none", "random")
        ]
    plain, drafted = texts
    assert drafted.token_ids == plain.token_ids
    assert drafted.usage.drafted_tokens >= 2 * drafted.usage.target_passes
    assert plain.usage.drafted_tokens == 0


def test_another_word_is_refused(tiny_target: Path) -> None:
    with pytest.raises(InvalidRequestError, match="drafting"):
        VerifierConfig(target=tiny_target, drafting="always")  # type: ignore[arg-type]
