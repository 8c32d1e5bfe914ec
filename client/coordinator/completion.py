"""One text as it grows: tokens in, deltas out, the end found, and everything counted up to the end only."""

from collections.abc import Sequence

from specla.client.detokenizer import Detokenizer
from specla.client.stop_strings import StopMatcher
from specla.rpc.errors import InternalError, InvalidRequestError
from specla.v1 import common_pb2, generation_pb2, verifier_pb2


class Completion:
    """The output of one request, from whichever verifier it comes.

    Attributes:
        tokens: all ids so far, resumed ones included; a stop string's last token ends them.
    """

    def __init__(
        self, prompt_tokens: int, pieces: Sequence[bytes], stops: Sequence[str], resumed_ids: Sequence[int]
    ) -> None:
        """Begin behind `resumed_ids`: their text counts for stop strings and characters, but is not given again.

        Raises:
            InvalidRequestError: the resumed text already holds a stop string.
        """
        self.tokens: list[int] = []
        self._prompt_tokens = prompt_tokens
        self._detokenizer = Detokenizer(pieces)
        self._matcher = StopMatcher(stops)
        self._finished: generation_pb2.Finished | None = None
        self._drafted: list[bool] = []
        self._logprobs: list[common_pb2.TokenLogprobs] = []
        self._passes: list[tuple[int, int]] = []  # a pass's first token in the completion, candidates it verified
        self._text = ""
        for token in resumed_ids:
            if self._append(token, drafted=False):
                raise InvalidRequestError(
                    "resumed_ids", "the resumed text already holds a stop string", hint="That text had ended"
                )
        self._given = len(self.tokens)
        self._text = ""

    @property
    def length(self) -> int:
        """Tokens of prompt and output: the verifier's committed_len as far as it is known here."""
        return self._prompt_tokens + len(self.tokens)

    @property
    def finished(self) -> generation_pb2.Finished | None:
        """Reason and usage once the text has ended."""
        return self._finished

    def extend(self, committed: verifier_pb2.Committed) -> None:
        """Take what a verifier committed; tokens behind the end of the text are dropped.

        Raises:
            InternalError: the verifier's counting and ours differ.
        """
        if self._finished is not None:
            return
        tokens, drafted, logprobs = list(committed.tokens), list(committed.drafted), list(committed.logprobs)
        passes = [(counts.tokens, counts.drafted) for counts in committed.passes]
        counted = sum([count for count, _ in passes])
        one_each = {counted, len(drafted), len(logprobs) or len(tokens)} == {len(tokens)}
        if committed.offset != self.length or not one_each:
            raise InternalError(
                f"the verifier sent {len(tokens)} tokens of {counted} counted at {committed.offset}, "
                f"expected at {self.length}"
            )
        first = len(self.tokens)
        for count, verified in passes:
            self._passes.append((first, verified))
            first += count
        if self._matcher.is_idle:  # nothing ends the text here: all of it at once
            self.tokens += tokens
            self._drafted += drafted
            self._logprobs += logprobs
            self._text += self._detokenizer.feed_all(tokens)
            return
        for i, token in enumerate(tokens):
            self._logprobs += logprobs[i : i + 1]
            stop = self._append(token, drafted=drafted[i])
            if stop is not None:
                self._end(common_pb2.FINISH_REASON_STOP_STRING, matched_stop=stop)
                return

    def finish(self, finished: verifier_pb2.SessionFinished) -> None:
        """The verifier ended the text; what was held back belongs to it after all.

        Raises:
            InternalError: it ended at another length than what it sent.
        """
        if self._finished is not None:
            return
        if finished.committed_len != self.length:
            raise InternalError(f"the verifier ended at {finished.committed_len}, its tokens at {self.length}")
        self._text += self._matcher.flush() + self._detokenizer.flush()
        self._end(finished.reason, matched_stop_id=finished.matched_stop_id)

    def take_delta(self) -> generation_pb2.Delta | None:
        """What is new since the last call, or None."""
        if self._given == len(self.tokens) and not self._text:
            return None
        first = self._given
        delta = generation_pb2.Delta(
            offset=first,
            token_ids=self.tokens[first:],
            drafted=self._drafted[first:],
            text=self._text,
            logprobs=self._logprobs,
        )
        self._given = len(self.tokens)
        self._text = ""
        self._logprobs = []
        return delta

    def _append(self, token: int, *, drafted: bool) -> str | None:
        self.tokens.append(token)
        self._drafted.append(drafted)
        match = self._matcher.feed(self._detokenizer.feed(token))
        self._text += match.text
        return match.stop

    def _end(self, reason: common_pb2.FinishReason, *, matched_stop: str = "", matched_stop_id: int = 0) -> None:
        kept = [verified for first, verified in self._passes if first < len(self.tokens)]
        self._finished = generation_pb2.Finished(
            reason=reason,
            matched_stop=matched_stop,
            matched_stop_id=matched_stop_id,
            usage=common_pb2.Usage(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(self.tokens),
                target_passes=len(kept),
                drafted_tokens=sum(kept),
                accepted_tokens=sum(self._drafted),
            ),
        )
