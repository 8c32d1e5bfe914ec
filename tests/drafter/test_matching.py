"""What a session of `lookup` and `suffix` learns from, and how often it looks for places."""

from specla.drafter_service.calibration import Calibration
from specla.drafter_service.continuations import Continuations
from specla.drafter_service.matching import REVIEW, STUDY, MatchState
from specla.drafter_service.occurrences import Occurrence, OccurrenceIndex


class _Session:
    """A state whose searches and counted guesses are noted."""

    def __init__(self, tokens: list[int]) -> None:
        self.looked: list[int] = []
        self.counted: list[bool] = []
        session, index = self, OccurrenceIndex((2, 8))

        class Noting(Calibration):
            def count(self, cell: int, hit: bool) -> float:
                session.counted.append(hit)
                return super().count(cell, hit)

        def find(end: int) -> list[Occurrence]:
            self.looked.append(end)
            return index.find_own(end, limit=8, enough=1)

        continuations = Continuations(Noting(), branching=3, tau=4.0)
        self.state = MatchState(tokens, index=index, find=find, continuations=continuations)

    def forget(self) -> None:
        self.looked.clear()
        self.counted.clear()


PHRASE = list(range(30))


def test_of_a_prompt_the_end_is_studied_with_the_first_draft() -> None:
    session = _Session([*PHRASE, *PHRASE[:28]])
    session.state.extend(PHRASE[28:])
    assert session.looked == []
    assert session.state.text == [*PHRASE, *PHRASE]
    session.state.draft(4)
    assert session.looked == [*range(60 - STUDY, 60), 60]
    assert session.counted == [True] * STUDY
    assert session.state.text == [*PHRASE, *PHRASE]
    alone = _Session([5])
    alone.state.draft(4)
    assert alone.looked == [0, 1]


def test_what_a_draft_guessed_is_learnt_without_another_search() -> None:
    session = _Session([*PHRASE, *PHRASE[:10]])
    session.state.draft(4)
    session.forget()
    assert session.state.draft(4).tokens == (10, 11, 12, 13)
    session.state.extend([10, 11, 12, 13, 14])  # all that were drafted, and the next, which was guessed as well
    assert session.looked == [40]
    assert session.counted == [True] * 5


def test_what_a_draft_did_not_reach_is_studied_a_few_tokens_of_it() -> None:
    session = _Session([*PHRASE, *PHRASE[:10]])
    session.state.draft(4)
    session.forget()
    session.state.draft(4)
    session.state.extend([10, 77, *PHRASE[:20]])
    assert session.looked == [40, *range(62 - REVIEW, 62)]
    assert session.counted == [True, False] + [True] * REVIEW
    session.forget()
    session.state.extend(PHRASE[20:22])
    assert session.looked == [62, 63]
    assert session.counted == [True, True]
