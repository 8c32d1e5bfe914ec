"""Matrix products on a CPU whose rows do not depend on each other: x [R, in] times weights [out, in], float32.

Exact mode promises that a token has the same bits alone, in a tree of 129 rows, or among other sessions' rows. BLAS
does not: it sums over K in another order for other numbers of rows. `DenseWeight` holds a weight matrix in the
fastest layout that does keep the promise on the machine at hand, and proves it before use:

- *packed*: MKL's packed product. The weights lie in the order in which they are read, so 1 to 16 rows stream them once
  at nearly one cost. K is cut in blocks of at most 384; each is summed in order, then the blocks are.
- *blocked*: oneDNN's product over weights it has reordered; some 20% slower, for builds without MKL.
- *rows*: a matrix-vector product a row; nothing can differ, and nothing is shared. The last resort.

Some CPUs sum the last of an odd number of rows differently (packed with AVX2: those after the last multiple of four);
there rows are padded to a multiple of `step` in which all are alike.

docs/decisions.md has the forms that were tried and what they cost.
"""

import hashlib
import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from specla.kernels.philox import noise_words


class Form(NamedTuple):
    """How weights are held, and to what multiple rows are padded with zeros."""

    layout: Literal["packed", "blocked", "rows"]
    step: int = 1

    def __str__(self) -> str:
        return self.layout if self.step == 1 else f"{self.layout}/{self.step}"


# In the order of their speed where they hold; docs/decisions.md has the figures.
FORMS: Final = (
    Form("packed"),
    Form("packed", 4),
    Form("blocked"),
    Form("blocked", 2),
    Form("packed", 16),
    Form("rows"),
)

MAX_ROWS: Final = 256  # of one call, proved at every start; more rows are several calls
PACKED_ROWS: Final = 256  # rows the packed product takes in one sweep over the weights
BLOCKED_ROWS: Final = 16  # rows oneDNN's order of weights is chosen for
CHECKED_WIDTHS: Final = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 64, 65, 129, 200, MAX_ROWS)
PROBED_ROWS: Final = 3
TOLERANCE: Final = 1e-5  # RMS of the product's error over RMS of the product

_log = logging.getLogger(__name__)


class DenseError(RuntimeError):
    """A product that does not keep its promise with this CPU, torch and number of threads."""


class DenseWeight:
    """A weight matrix prepared once for exact (and, on request, fast) products on a CPU.

    Attributes:
        out_features, in_features: the shape [out, in].
        form: how it is held; part of what `numerics_tag` names.
    """

    __slots__ = ("_held", "_plain", "_unused", "form", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, *, form: Form | None = None, keep_plain: bool = False):
        """Copies the weights into the layout of `form`.

        Args:
            weight: [out, in], float32 or bfloat16 (widened, which is exact), on the CPU.
            form: None takes the first of FORMS that keeps the promise at this shape, found by trying.
            keep_plain: also hold the weights as they were, for `fast_linear` of one row (twice the memory).

        Raises:
            DenseError: the weights are not a float matrix on the CPU, or the form is not to be had here.
        """
        if weight.dim() != 2 or weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
            raise DenseError(
                f"weights are {weight.dtype} {tuple(weight.shape)} on {weight.device}: "
                "give a float32 or bfloat16 matrix [out, in] on the CPU"
            )
        plain = weight.detach().to(torch.float32).contiguous()
        self.out_features, self.in_features = plain.shape
        self.form = form or best_form(self.out_features, self.in_features, torch.get_num_threads())
        if not is_available(self.form):
            raise DenseError(f"torch {torch.__version__} has no {self.form.layout} product here: choose another form")
        self._held = plain
        self._unused = plain
        if self.form.layout == "packed":
            self._held = torch.ops.mkl._mkl_reorder_linear_weight(plain, PACKED_ROWS)
            # The product takes the unpacked weights too, to fall back on; it reads their shape only. Should a future
            # build use them all the same, NaN shows it, where the true weights would silently lose exactness.
            self._unused = torch.full((1, 1), torch.nan).expand_as(plain)
        elif self.form.layout == "blocked":
            self._held = torch.ops.mkldnn._reorder_linear_weight(plain, BLOCKED_ROWS)
        self._plain = plain.t().contiguous() if keep_plain else None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x @ W^T without checks of x: [R, in] float32 to [R, out]; `exact_linear` checks."""
        R = x.shape[0]
        if R > MAX_ROWS:
            return torch.cat([self.product(part) for part in x.split(MAX_ROWS)])
        missing = -R % self.form.step
        if missing:
            return self._multiply(functional.pad(x, (0, 0, 0, missing)))[:R]
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        R = x.shape[0]
        if R == 0:
            return x.new_empty(0, self.out_features)
        if self.form.layout == "packed":
            return torch.ops.mkl._mkl_linear(x, self._held, self._unused, None, R)  # type: ignore[no-any-return]
        if self.form.layout == "blocked":
            return torch.ops.mkldnn._linear_pointwise(x, self._held, None, "none", [], "")  # type: ignore[no-any-return]
        return torch.stack([torch.mv(self._held, row) for row in x])


def exact_linear(x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
    """x @ W^T; a row's bits depend on that row and the weights only.

    Args:
        x: [R, in] float32 on the CPU, any R.
        weight: [out, in].

    Returns:
        [R, out] float32.

    Raises:
        DenseError: x is not float32 [R, in].
    """
    _check_input(x, weight)
    return weight.product(x)


def fast_linear(x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
    """x @ W^T in the form measured fastest for that number of rows; one row may differ from `exact_linear` in bits.

    Only one row has a faster form, and only if the weight was made with `keep_plain`: a plain matrix-vector product.

    Raises:
        DenseError: x is not float32 [R, in].
    """
    _check_input(x, weight)
    if x.shape[0] == 1 and weight._plain is not None:
        return x @ weight._plain
    return weight.product(x)


def _check_input(x: torch.Tensor, weight: DenseWeight) -> None:
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype is not torch.float32:
        raise DenseError(f"x is {x.dtype} {tuple(x.shape)}: give float32 [R, {weight.in_features}]")


def is_available(form: Form) -> bool:
    """Whether this build of torch has the operations of a form."""
    if form.layout == "packed":
        return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")
    if form.layout == "blocked":
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return True


@lru_cache(maxsize=256)
def best_form(out_features: int, in_features: int, threads: int) -> Form:
    """The first of FORMS that keeps the promise at this shape, found by trying each on random weights.

    Args:
        out_features, in_features: shape of the weights.
        threads: torch's number of threads; it only keys the answer.
    """
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(threads))
    reasons: list[str] = []
    for form in FORMS:
        reason: str | None = "not in this build of torch"
        if is_available(form):
            reason = row_dependence(DenseWeight(weight, form=form), weight)
        if reason is None:
            if reasons:
                _log.info("dense product [%d, %d] is %s, not %s", out_features, in_features, form, "; ".join(reasons))
            return form
        reasons.append(f"{form}: {reason}")
    raise DenseError(f"no product [{out_features}, {in_features}] keeps rows apart here: {'; '.join(reasons)}")


def row_dependence(weight: DenseWeight, plain: torch.Tensor | None = None) -> str | None:
    """What breaks the promise of `exact_linear`, or None: tries many widths, places and neighbours.

    Args:
        weight: what to try.
        plain: [out, in] float32, if at hand, to compare the values with a float64 product.
    """
    x = torch.randn(MAX_ROWS, weight.in_features, generator=torch.Generator().manual_seed(0))
    whole = weight.product(x)
    for width in CHECKED_WIDTHS:
        start = (7 * width) % (MAX_ROWS - width + 1)
        rows = slice(start, start + width)
        if not torch.equal(weight.product(x[rows]), whole[rows]):
            return f"bits differ between {width} and {MAX_ROWS} rows"
    x[1::2] = torch.nan
    if not torch.equal(weight.product(x)[::2], whole[::2]):
        return "a row of NaN reaches its neighbours"
    if plain is not None:
        true = x[:3:2].double() @ plain.double().t()
        error = (whole[:3:2] - true).square().mean().sqrt() / true.square().mean().sqrt()
        if not error < TOLERANCE:
            return f"the product is off by {float(error):.1e} (RMS) from float64"
    return None


def verify_row_independence(weights: Iterable[DenseWeight]) -> None:
    """Proves the promise of `exact_linear` anew, once for each shape among `weights`; for an engine's start.

    Call it after the number of threads is set: the form was chosen under the number at that time.

    Raises:
        DenseError: a product depends on the number of rows or on other rows.
    """
    shapes = {(w.out_features, w.in_features, w.form): w for w in weights}
    for (out_features, in_features, form), weight in shapes.items():
        reason = row_dependence(weight)
        if reason is not None:
            raise DenseError(
                f"the {form} product [{out_features}, {in_features}] is not exact with torch {torch.__version__} and "
                f"{torch.get_num_threads()} threads: {reason}. Prepare the weights after setting the number of "
                "threads, or choose fast numerics"
            )


def numerics_tag(weights: Iterable[DenseWeight]) -> str:
    """What fixes the bits of these products: torch's version, the CPU's vector unit, the forms, and a probe's bits.

    Some libraries split K by the number of threads, some do not. The probe tells: equal tags are equal bits, and two
    numbers of threads have one tag where they do the same.
    """
    shapes = {(w.out_features, w.in_features, w.form): w for w in weights}
    digest = hashlib.sha256()
    for _, weight in sorted(shapes.items()):
        # From integers, for the same numbers everywhere: torch's own generators differ in the last bit between CPUs.
        words = noise_words(0, 0, PROBED_ROWS * weight.in_features).astype(np.float32)
        x = torch.from_numpy(words * np.float32(2.0**-31) - 1).view(PROBED_ROWS, -1)
        digest.update(weight.product(x).numpy().tobytes())
    forms = "+".join(sorted({str(w.form) for w in shapes.values()}))
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return f"torch-{torch.__version__}/{capability}/{forms}/{digest.hexdigest()[:8]}"
