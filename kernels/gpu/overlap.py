"""Launches that overlap: one may begin while the kernel before it still runs, and says when the next one may.

Every kernel waits for the one before, so whoever has waited knows that all earlier ones are done, too. A kernel that
admits the next one only then leaves it free to use, before its own wait, whatever the kernel before did not write. A
kernel that admits the next one at once lets it begin one kernel earlier still; where several in a row do, the last may
begin while any of them runs.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

Admit = Literal["start", "waited"]
"""When a kernel lets the next one begin: at once, if that one, before it waits, uses nothing that this kernel or the
one before it writes; or after its own wait, if it uses nothing that this kernel writes."""

ADMITS_AT_START = tl.constexpr(2)
ADMITS_ONCE_WAITED = tl.constexpr(1)
"""What kernels are compiled with; 0 for a launch that does not overlap."""


def overlapping(overlap: bool, admit: Admit = "waited") -> int:
    """The value that a kernel is compiled with; launches cannot overlap in the interpreter."""
    if not overlap or triton.knobs.runtime.interpret:
        return 0
    return int((ADMITS_AT_START if admit == "start" else ADMITS_ONCE_WAITED).value)


@triton.jit
def admit_at_start(OVERLAP: tl.constexpr):
    """The first thing that a kernel does."""
    if OVERLAP == ADMITS_AT_START:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Waits for the kernel before. All programs do, used or not: whoever ends has waited."""
    if OVERLAP:
        gdc_wait()
        if OVERLAP == ADMITS_ONCE_WAITED:
            gdc_launch_dependents()
