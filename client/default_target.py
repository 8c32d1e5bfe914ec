"""Where the shipped target lies."""

from pathlib import Path

SHIPPED = Path(__file__).resolve().parent.parent / "models"


def default_target() -> Path:
    """The shipped target's folder: beside the packages, in a checkout (`models/`) as in an installed wheel."""
    return SHIPPED
