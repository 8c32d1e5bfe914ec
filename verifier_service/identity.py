"""Who a verifier is and what it accepts, read off its engine once."""

from specla.rpc.settings import MAX_MESSAGE_BYTES
from specla.v1 import verifier_pb2
from specla.verifier_service.engine import Engine
from specla.verifier_service.intake import Limits

CAPABILITIES = ("features", "top_k", "draft_ahead", "resume")


def limits_of(engine: Engine) -> Limits:
    """What a verifier with this engine accepts."""
    model, config = engine.target.config, engine.config
    return Limits(
        vocab_size=model.vocab_size,
        num_layers=model.num_hidden_layers,
        eos_ids=frozenset(model.eos_token_ids),
        numerics_id=engine.target.numerics_id,
        max_rows=config.max_rows,
        max_prompt_tokens=config.max_prompt_tokens,
        max_new_tokens=config.max_new_tokens,
    )


def describe(engine: Engine, limits: Limits, verifier_id: str) -> verifier_pb2.GetTargetResponse:
    """Who this verifier is, but for its address."""
    model = engine.target.config
    return verifier_pb2.GetTargetResponse(
        verifier_id=verifier_id,
        model=engine.target.model_name,
        numerics_id=limits.numerics_id,
        tokenizer_hash=engine.target.tokenizer_hash,
        dims=verifier_pb2.TargetDims(
            vocab_size=limits.vocab_size, hidden_size=model.hidden_size, num_layers=limits.num_layers
        ),
        limits=verifier_pb2.Limits(
            max_rows=limits.max_rows,
            max_prompt_tokens=limits.max_prompt_tokens,
            max_new_tokens=limits.max_new_tokens,
            max_sessions=engine.max_sessions,
            max_message_bytes=MAX_MESSAGE_BYTES,
        ),
        capabilities=CAPABILITIES,
        eos_ids=sorted(limits.eos_ids),
    )
