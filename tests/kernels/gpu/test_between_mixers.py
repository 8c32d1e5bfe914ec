"""One row from mixer to mixer in one launch: bits of separate launches, whatever the shape, pace and overlap."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import triton

from specla.kernels.gpu.between_mixers import (
    DenseRow,
    DenseWeights,
    MeetingPlace,
    Pace,
    between_mixers,
    why_apart,
)
from specla.kernels.gpu.norms import add_rms_norm
from specla.kernels.gpu.product import product, product_parts
from specla.kernels.gpu.product_streamed import on_hopper

EPS = 1e-6
POISON = 7777.0


class Shape(NamedTuple):
    """D, V, M and I of a model's layers."""

    hidden: int
    values: int
    channels: int
    inputs: int


MODEL = Shape(2048, 2048, 5632, 8208)
SHAPES = [MODEL, Shape(512, 512, 640, 1040), Shape(512, 256, 1024, 1296), Shape(1024, 2048, 4608, 64)]


def poison(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype, device="cuda")


def count(rows: int) -> torch.Tensor:
    return torch.tensor([rows], dtype=torch.int32, device="cuda")


class Model:
    """A few layers of random weights."""

    def __init__(self, shape: Shape, dtype: torch.dtype, layers: int) -> None:
        drawn = torch.Generator("cuda").manual_seed(sum(shape) + layers)

        def matrix(outputs: int, inputs: int) -> torch.Tensor:
            return (torch.randn(outputs, inputs, generator=drawn, device="cuda") * inputs**-0.5).to(dtype)

        def norm() -> torch.Tensor:
            return 1 + 0.1 * torch.randn(shape.hidden, generator=drawn, device="cuda")

        self.shape, self.dtype = shape, dtype
        self.layers = [
            DenseWeights(
                matrix(shape.hidden, shape.values),
                norm(),
                matrix(2 * shape.channels, shape.hidden),
                matrix(shape.hidden, shape.channels),
                norm(),
                None if i + 1 == layers else matrix(shape.inputs, shape.hidden),
            )
            for i in range(layers)
        ]
        self.mixed = torch.randn(layers, 1, shape.values, generator=drawn, device="cuda").to(dtype)
        self.stream = torch.randn(1, shape.hidden, generator=drawn, device="cuda")
        self.parts = tuple(product_parts(shape.hidden, width) for width in (shape.values, shape.channels))

    def row(self) -> DenseRow:
        """Poisoned, but for the stream; the two products share their scratch, as in a pass."""
        hidden, values, channels, inputs = self.shape
        parts = poison(max(self.parts), 1, hidden, dtype=torch.float32)
        return DenseRow(
            poison(1, values, dtype=self.dtype),
            self.stream.clone(),
            parts[: self.parts[0]],
            parts[: self.parts[1]],
            poison(1, channels, dtype=self.dtype),
            poison(1, inputs, dtype=self.dtype),
            poison(1, hidden, dtype=self.dtype),
        )

    def apart(self) -> list[torch.Tensor]:
        """What separate launches make: after each layer the stream and the next inputs, or the last normed row."""
        row, rows, found = self.row(), count(1), []
        normed = poison(1, self.shape.hidden, dtype=self.dtype)
        for mixed, layer in zip(self.mixed, self.layers, strict=True):
            product(mixed, layer.output, row.from_mixer, rows)
            add_rms_norm(row.stream, row.from_mixer, layer.mlp_norm, EPS, normed, rows)
            product(normed, layer.gate_up, row.activated, rows, swiglu=True)
            product(row.activated, layer.down, row.from_mlp, rows)
            add_rms_norm(row.stream, row.from_mlp, layer.next_norm, EPS, normed, rows)
            if layer.next_inputs is not None:
                product(normed, layer.next_inputs, row.inputs, rows)
            found += [row.stream.clone(), normed.clone() if layer.next_inputs is None else row.inputs.clone()]
        return found

    def together(self, place: MeetingPlace, pace: Pace | None = None, *, overlap: bool = False) -> list[torch.Tensor]:
        """The same in one launch a layer."""
        row, rows, found = self.row(), count(1), []
        for mixed, layer in zip(self.mixed, self.layers, strict=True):
            row.mixed.copy_(mixed)
            between_mixers(row, layer, EPS, rows, place, overlap=overlap, pace=pace or Pace())
            last = layer.next_inputs is None
            found += [row.stream.clone(), row.final.clone() if last else row.inputs.clone()]
            assert last or bool((row.final == POISON).all())
        return found


@pytest.fixture
def place() -> MeetingPlace:
    found = MeetingPlace.of(torch.device("cuda"))
    assert found is not None
    return found


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    assert all(bool(torch.isfinite(x.float()).all()) and not bool((x == POISON).any()) for x in one)
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_separate_launches(place: MeetingPlace, shape: Shape, dtype: torch.dtype) -> None:
    model = Model(shape, dtype, layers=3)
    wanted = model.apart()
    assert equal(wanted, model.together(place))
    assert equal(wanted, model.together(place, overlap=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
def test_norms_of_many_rows(place: MeetingPlace, shape: Shape) -> None:
    """In float16, whose bits tell more; an error in a sum's last bit seldom reaches them."""
    model, rows = Model(shape, torch.float16, layers=1), count(1)
    layer, drawn = model.layers[0], torch.Generator("cuda").manual_seed(5)
    row, normed = model.row(), poison(1, shape.hidden, dtype=torch.float16)
    row.mixed.zero_()
    together, apart = [], []
    for _ in range(500):
        stream = torch.randn(1, shape.hidden, generator=drawn, device="cuda")
        row.stream.copy_(stream)
        between_mixers(row, layer, EPS, rows, place)
        together += [row.final.clone(), row.stream.clone()]
        row.stream.copy_(stream)
        product(row.mixed, layer.output, row.from_mixer, rows)
        add_rms_norm(row.stream, row.from_mixer, layer.mlp_norm, EPS, normed, rows)
        product(normed, layer.gate_up, row.activated, rows, swiglu=True)
        product(row.activated, layer.down, row.from_mlp, rows)
        add_rms_norm(row.stream, row.from_mlp, layer.next_norm, EPS, normed, rows)
        apart += [normed.clone(), row.stream.clone()]
    assert equal(together, apart)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pace",
    [Pace(2, 1, 1, 0, 0), Pace(3, 3, 1, 2, 1), Pace(11, 11, 2, 11, 11), Pace(4, 2, 4, 40, 40), Pace(5, 5, 5, 3, 0)],
)
def test_the_pace_changes_no_bits(place: MeetingPlace, pace: Pace) -> None:
    for shape in (MODEL, SHAPES[1], SHAPES[3]):
        model = Model(shape, torch.bfloat16, layers=2)
        assert equal(model.apart(), model.together(place, pace))


@pytest.mark.gpu
def test_captured_launches_meet_again_and_again(place: MeetingPlace) -> None:
    """Eight layers back to back, replayed: no launch takes another one's arrivals for its own."""
    model = Model(MODEL, torch.bfloat16, layers=8)
    wanted, row, rows = model.apart(), model.row(), count(1)
    every = [row._replace(mixed=mixed) for mixed in model.mixed]

    def launch() -> None:
        for own, layer in zip(every, model.layers, strict=True):
            between_mixers(own, layer, EPS, rows, place, overlap=True)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(20):
        row.stream.copy_(model.stream)
        for x in row[2:]:
            x.fill_(POISON)
        graph.replay()
        assert torch.equal(row.stream, wanted[-2])
        assert torch.equal(row.final, wanted[-1])
        assert torch.equal(row.inputs, wanted[-3])


@pytest.mark.gpu
def test_a_row_that_does_not_count_is_left_alone(place: MeetingPlace) -> None:
    for layer in Model(MODEL, torch.bfloat16, layers=2).layers:
        row = Model(MODEL, torch.bfloat16, layers=2).row()
        row.mixed.fill_(float("nan"))
        before = [x.clone() for x in row]
        between_mixers(row, layer, EPS, count(0), place)
        assert all(torch.equal(a, b) for a, b in zip(row[1:], before[1:], strict=True))


@pytest.mark.gpu
def test_one_place_a_device_and_none_for_other_streams(place: MeetingPlace) -> None:
    assert MeetingPlace.of(torch.device("cuda", torch.cuda.current_device())) is place
    with torch.cuda.stream(torch.cuda.Stream()):
        assert MeetingPlace.of(torch.device("cuda")) is None
    with ThreadPoolExecutor(4) as pool:  # other threads run in the same stream
        assert all(found is place for found in pool.map(lambda _: MeetingPlace.of(torch.device("cuda")), range(8)))


def test_no_other_device_has_one() -> None:
    assert not on_hopper(torch.device("cpu"))
    assert MeetingPlace.of(torch.device("cpu")) is None
    assert MeetingPlace.of(torch.device("meta")) is None


@pytest.mark.gpu
def test_two_threads_take_turns(place: MeetingPlace) -> None:
    """Two models launched from two threads, in the one stream that both run in."""
    models = [Model(shape, torch.bfloat16, layers=2) for shape in (MODEL, SHAPES[3])]
    wanted = [model.apart() for model in models]

    def run(index: int) -> bool:
        return all(equal(wanted[index], models[index].together(place, overlap=True)) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, range(2)))


def weights_of(hidden: int, values: int, channels: int, inputs: int, *, device: str = "cuda") -> DenseWeights:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    norm = empty(hidden, dtype=torch.float32)
    return DenseWeights(
        empty(hidden, values), norm, empty(2 * channels, hidden), empty(hidden, channels), norm, empty(inputs, hidden)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "parts", "why"),
    [
        ((768, 256, 512, 256), (1, 1), "power of two"),
        ((256, 256, 512, 256), (1, 1), "power of two"),
        ((4096, 256, 512, 256), (1, 1), "power of two"),
        ((512, 320, 512, 256), (1, 1), "blocks of 128"),
        ((512, 256, 512, 264), (1, 1), "blocks of 128"),
        ((512, 256, 512, 256), (4, 1), "blocks of 128"),
        ((2048, 2048, 5632, 256), (8, 4), "more units than"),
        ((512, 256, 4096, 256), (1, 1), "multiplied at a time"),
        ((512, 256, 512, 256), (0, 1), "one part at the least"),
    ],
)
def test_weights_that_take_separate_launches(
    shape: tuple[int, int, int, int], parts: tuple[int, int], why: str
) -> None:
    found = why_apart(weights_of(*shape), parts)
    assert found is not None
    assert why in found


@pytest.mark.gpu
def test_weights_of_32_bits_take_separate_launches() -> None:
    weights = DenseWeights(*(None if x is None else x.float() for x in weights_of(512, 256, 512, 256)))
    assert "16 bits" in (why_apart(weights, (1, 1)) or "")


def test_weights_elsewhere_take_separate_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    found = why_apart(weights_of(512, 256, 512, 256, device="cpu"), (1, 1))
    assert found is not None
    assert "Hopper" in found


@pytest.mark.gpu
def test_what_does_not_belong_together_is_refused(place: MeetingPlace) -> None:
    model = Model(SHAPES[1], torch.bfloat16, layers=2)
    row, layer, rows = model.row(), model.layers[0], count(1)
    wrong = [
        (row._replace(mixed=row.mixed[:, :-8]), layer, Pace(), "mixed"),
        (row._replace(stream=row.stream.half()), layer, Pace(), "stream"),
        (row._replace(from_mlp=row.from_mlp.repeat(1, 2, 1)), layer, Pace(), "from_mlp"),
        (row._replace(inputs=row.inputs.float()), layer, Pace(), "inputs"),
        (row, layer._replace(down=layer.down[:, :-128].contiguous()), Pace(), "down|activated"),
        (row, layer._replace(next_norm=layer.next_norm.bfloat16()), Pace(), "next_norm"),
        (row, layer, Pace(1, 1, 1, 0, 0), "stages"),
        (row, layer, Pace(stages=4), "flight"),
        (row, layer, Pace(low_flight=0), "flight"),
        (row, layer, Pace(ahead=2, early=3), "early"),
    ]
    for own, weights, pace, why in wrong:
        with pytest.raises(ValueError, match=why):
            between_mixers(own, weights, EPS, rows, place, pace=pace)
    with pytest.raises(ValueError, match="rows"):
        between_mixers(row, layer, EPS, rows.long(), place)
    with pytest.raises(ValueError, match="the place is on cpu"):
        between_mixers(row, layer, EPS, rows, MeetingPlace(torch.device("cpu")))
