"""From a configuration to its drafter."""

from specla.drafter_service.config import DrafterConfig
from specla.drafter_service.drafter import Drafter
from specla.drafter_service.drafters.lookup import LookupDrafter
from specla.drafter_service.drafters.none import NoneDrafter
from specla.drafter_service.drafters.oracle import OracleDrafter
from specla.drafter_service.drafters.random import RandomDrafter
from specla.drafter_service.drafters.suffix import SuffixDrafter


def make_drafter(config: DrafterConfig) -> Drafter:
    """The drafter called `config.name`.

    Raises:
        InvalidRequestError: its own settings are wrong, such as a file that cannot be read.
    """
    match config.name:
        case "none":
            return NoneDrafter()
        case "lookup":
            return LookupDrafter(
                min_ngram=config.min_ngram, max_ngram=config.max_ngram, branching=config.branching, tau=config.tau
            )
        case "suffix":
            return SuffixDrafter(
                branching=config.branching,
                tau=config.tau,
                history_tokens=config.history_tokens if config.share_history else 0,
            )
        case "random":
            return RandomDrafter(seed=config.seed, probability=config.random_probability)
        case "oracle":
            assert config.oracle_file is not None  # the config refuses an oracle without
            return OracleDrafter.from_file(
                config.oracle_file, rate=config.oracle_rate, branching=config.oracle_branching, seed=config.seed
            )
    raise AssertionError(f"{config.name} is in KNOWN but not made here")
