"""`specla bench`: every figure of the documents comes from one of these commands."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specla.benchmarks.prompt_set import HELD_OUT
from specla.benchmarks.report import Report, cpu_name

NUMERICS: tuple[Literal["exact", "fast"], ...] = ("exact", "fast")


def _numbers(text: str, option: str) -> list[float]:
    """Numbers separated by commas; anything else is a usage error."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers", param_hint=option) from None


def _drafters(text: str, option: str) -> list[str]:
    """Names separated by commas, plain decoding among them: it is what the others are compared with."""
    names = [name.strip() for name in text.split(",")]
    if "none" not in names:
        raise typer.BadParameter("none, plain decoding, must be among them", param_hint=option)
    return names


bench = typer.Typer(help="Measure speed, identity and acceptance.", no_args_is_help=True)

TargetOption = Annotated[Path | None, typer.Option(envvar="SPECLA_TARGET", help="Checkpoint; default: shipped.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Where to write the result.")]
PromptsOption = Annotated[Path, typer.Option(help="JSON lines of {id, domain, text}.")]
NumericsOption = Annotated[Literal["exact", "fast"], typer.Option(help="Kind of arithmetic.")]


@bench.command()
def identity(
    target: TargetOption = None,
    drafters: Annotated[str, typer.Option(help="Separated by commas.")] = "none,lookup,suffix,random",
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1",
    joins: Annotated[str, typer.Option(help="Separated by commas.")] = "one process,services",
    prompts: PromptsOption = HELD_OUT,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 16,
    baseline_batch: Annotated[int, typer.Option(min=1, help="Sessions at a time of the baseline.")] = 1,
    max_nodes: Annotated[int, typer.Option(min=1, help="Candidates of one draft.")] = 4,
    numerics: NumericsOption = "exact",
    journal: Annotated[Path, typer.Option(help="Texts so far; an existing one is gone on with.")] = Path(
        "runs/identity.jsonl"
    ),
    json: JsonOption = None,
) -> None:
    """The same tokens for a seed, whatever drafts, however joined; exits 1 if a text differs.

    Every draft is verified, whatever it costs, so that worthless ones count too.
    """
    from specla.benchmarks import identity as work
    from specla.benchmarks.prompt_set import load
    from specla.benchmarks.services import services
    from specla.client.default_target import default_target
    from specla.client.local import Local
    from specla.drafter_service.config import DrafterConfig
    from specla.verifier_service.config import VerifierConfig

    folder = target or default_target()
    names = _drafters(drafters, "--drafters")
    joined = [join.strip() for join in joins.split(",")]
    if unknown := [join for join in joined if join not in ("one process", "services")]:
        raise typer.BadParameter(f"no join is called {unknown[0]!r}", param_hint="--joins")
    columns = work.cases(
        names,
        _numbers(temperatures, "--temperatures"),
        joined,
        batch,
        baseline_batch,
    )
    chosen = load(prompts, limit=limit)
    settings = work.settings_of(chosen, numerics=numerics, max_tokens=max_tokens, max_nodes=max_nodes)
    try:
        texts = work.Journal(journal, settings)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--journal") from None
    wanted = {prompt.id for prompt in chosen}
    done = sum(len(wanted & set(texts.of(case))) for case in columns)
    drafting = [name for name in names if name != "none"]
    with ExitStack() as stack, _progress() as progress:
        task = progress.add_task("texts", total=len(columns) * len(chosen), completed=done)
        generators: dict[str, work.Generator] = {}

        def generator_of(join: str) -> work.Generator:
            if join not in generators:
                if join == "one process":
                    config = VerifierConfig(
                        target=folder,
                        numerics=numerics,
                        max_sessions=max(batch, baseline_batch),
                        drafting="unconditional",
                    )
                    generators[join] = stack.enter_context(
                        Local(
                            verifier=config,
                            drafters=[DrafterConfig(name=name, max_nodes=max_nodes) for name in drafting],
                        )
                    )
                else:
                    generators[join] = stack.enter_context(
                        services(
                            folder,
                            drafting,
                            verifier_options=[
                                f"--numerics={numerics}",
                                f"--max-sessions={batch}",
                                "--drafting=unconditional",
                            ],
                            drafter_options=[f"--max-nodes={max_nodes}"],
                        )
                    )
            return generators[join]

        work.run(columns, chosen, texts, generator_of, max_tokens=max_tokens, progress=lambda _: progress.advance(task))
    _finish(work.report(columns, chosen, texts, device=cpu_name()), json)


@bench.command()
def drafters(
    target: TargetOption = None,
    names: Annotated[str, typer.Option(help="Separated by commas.")] = "none,lookup,suffix",
    prompts: PromptsOption = HELD_OUT,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 12,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(min=1)] = 192,
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0,0.7,1",
    numerics: NumericsOption = "exact",
    json: JsonOption = None,
) -> None:
    """Each drafter against plain decoding, on code that repeats itself and on prose; exits 1 if a goal is missed."""
    from specla.benchmarks import drafters as work
    from specla.benchmarks.prompt_set import load
    from specla.client.default_target import default_target
    from specla.client.local import Local

    all_names = _drafters(names, "--names")
    degrees_asked = _numbers(temperatures, "--temperatures")
    folder = target or default_target()
    made = Report(title="Drafters over plain decoding", device=cpu_name())
    made.notes.update(temperatures=temperatures, max_tokens=max_tokens, rounds=rounds, numerics=numerics)
    with (
        Local(folder, drafters=[n for n in all_names if n != "none"], numerics=numerics) as local,
        _progress() as progress,
    ):
        made.notes["numerics_id"] = local.model().numerics_id
        for degrees in degrees_asked:
            ratios = {}
            for domain in (work.REPEATING, work.PROSE):
                chosen = load(prompts, domain=domain, limit=limit)
                case = f"{domain}, T = {degrees:g}"
                task = progress.add_task(case, total=rounds * len(chosen) * len(all_names))
                timed = work.measure(
                    local,
                    chosen,
                    all_names,
                    rounds=rounds,
                    max_tokens=max_tokens,
                    temperature=degrees,
                    progress=lambda task=task: progress.advance(task),  # type: ignore[misc]
                )
                ratios[domain] = work.add_rows(made, case, timed, prompts=len(chosen))
            work.add_goals(made, degrees, ratios[work.REPEATING], ratios[work.PROSE])
    _finish(made, json)


@bench.command()
def price(
    target: TargetOption = None,
    drafters: Annotated[str, typer.Option(help="Separated by commas.")] = "none,suffix",
    prompts: PromptsOption = HELD_OUT,
    limit: Annotated[int, typer.Option(min=2, help="Prompts, of all kinds.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    json: JsonOption = None,
) -> None:
    """Exact numerics over fast, whole texts through services; exits 1 if exact costs more than a default may."""
    from specla.benchmarks import price as work
    from specla.benchmarks.identity import Generator
    from specla.benchmarks.prompt_set import load
    from specla.benchmarks.services import services
    from specla.client.default_target import default_target

    names = _drafters(drafters, "--drafters")
    chosen = load(prompts, limit=limit)
    made = Report(title="Exact numerics over fast, end to end", device=cpu_name())
    made.notes.update(max_tokens=max_tokens, prompts=len(chosen), temperature=0.0)
    with ExitStack() as stack, _progress() as progress:
        task = progress.add_task("texts", total=2 * len(chosen) * len(names))
        generators: dict[str, Generator] = {
            numerics: stack.enter_context(
                services(target or default_target(), names, verifier_options=[f"--numerics={numerics}"])
            )
            for numerics in NUMERICS
        }
        for generator in generators.values():
            generator.generate("warm up", drafter="none", max_tokens=4, temperature=0.0, seed=0)
        taken = work.measure(generators, chosen, names, max_tokens=max_tokens, progress=lambda: progress.advance(task))
    work.add_to(made, taken)
    _finish(made, json)


@bench.command()
def passes(
    target: TargetOption = None,
    rows: Annotated[str, typer.Option(help="Rows of a pass, root included; separated by commas.")] = "2,5,9,17",
    rounds: Annotated[int, typer.Option(min=4)] = 60,
    threads: Annotated[int, typer.Option(min=0, help="Threads of one operation; 0: chosen by the verifier.")] = 0,
    json: JsonOption = None,
) -> None:
    """Verification passes of several sizes over plain decoding, in both numerics; exits 1 if a goal is missed."""
    from specla.benchmarks import passes as work
    from specla.benchmarks.prompt_set import load
    from specla.client.default_target import default_target
    from specla.client.tokenizer import Tokenizer
    from specla.verifier_service.config import VerifierConfig
    from specla.verifier_service.engine import Engine

    folder = target or default_target()
    counts = [int(n) for n in _numbers(rows, "--rows")]
    prompt = Tokenizer.load(folder).encode(load()[0].text)
    made = Report(title="Passes over plain decoding", device=cpu_name())
    kinds = work.shapes(counts)
    engines = {
        numerics: Engine(
            VerifierConfig(
                target=folder,
                numerics=numerics,
                threads=threads,
                max_sessions=len(kinds) + 1,
                max_rows=max(counts),
            )
        )
        for numerics in NUMERICS
    }
    with _progress() as progress:
        for numerics, engine in engines.items():
            made.notes[f"numerics_id, {numerics}"] = engine.target.numerics_id
            task = progress.add_task(numerics, total=rounds + 2)
            seconds = work.measure(
                engine,
                prompt,
                counts,
                rounds=rounds,
                progress=lambda task=task: progress.advance(task),  # type: ignore[misc]
            )
            work.add_to(made, numerics, seconds)
    work.add_price(made, work.measure_price(engines["exact"], engines["fast"], prompt, rounds=4 * rounds))
    _finish(made, json)


@bench.command()
def numerics(
    target: TargetOption = None,
    prompts: PromptsOption = HELD_OUT,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only so many texts.")] = None,
    rows: Annotated[int, typer.Option(min=1, max=64, help="Rows of a pass.")] = 16,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the passes run.")] = "cpu",
    json: JsonOption = None,
) -> None:
    """How often fast numerics choose another token than exact ones, and how near a tie exact decoding was there."""
    from specla.benchmarks import numerics as work
    from specla.benchmarks.prompt_set import load
    from specla.client.default_target import default_target
    from specla.client.tokenizer import Tokenizer
    from specla.verifier_service.config import VerifierConfig
    from specla.verifier_service.engine import Engine

    folder = target or default_target()
    tokenizer = Tokenizer.load(folder)
    texts = [tokenizer.encode(prompt.text) for prompt in load(prompts, limit=limit)]
    made = Report(title="Fast numerics against exact ones", device=cpu_name())
    exact, fast = (
        Engine(VerifierConfig(target=folder, device=device, numerics=mode, max_sessions=1, max_rows=rows))
        for mode in NUMERICS
    )
    made.notes.update({"numerics_id, exact": exact.target.numerics_id, "numerics_id, fast": fast.target.numerics_id})
    made.notes["rows of a pass"] = rows
    with _progress() as progress:
        task = progress.add_task("texts", total=len(texts))
        found = work.differences(exact, fast, texts, rows, lambda: progress.advance(task))
    work.add_to(made, found, sum(map(len, texts)))
    _finish(made, json)


@bench.command()
def kernels(
    only: Annotated[
        Literal["all", "goals"], typer.Option(help="goals: nothing but the cases that goals hang on, in fewer rounds.")
    ] = "all",
    budget: Annotated[float, typer.Option(min=0, help="Seconds after which no further case is begun.")] = 420.0,
    pictures: Annotated[Path | None, typer.Option(help="Folder for kernel-times.svg and kernel-drift.svg.")] = None,
    tune: Annotated[
        Path | None, typer.Option(help="Measure what the selector chooses from instead; write its table there.")
    ] = None,
    tune_rows: Annotated[str, typer.Option(help="Tune these buckets alone: rows of a tree, by commas.")] = "",
    json: JsonOption = None,
) -> None:
    """The verification kernels and their rivals on a GPU; exits 1 if one is wrong or a goal is missed."""
    from specla.benchmarks.kernels import cases
    from specla.benchmarks.kernels import run as work
    from specla.benchmarks.kernels.device import NoDeviceError
    from specla.benchmarks.kernels.pictures import draw
    from specla.benchmarks.kernels.preparation import TaskError
    from specla.benchmarks.kernels.tune import tune as measure_table

    console = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    def save(made: Report) -> None:
        if json is not None:
            made.write(json)

    try:
        if tune is not None:
            buckets = [int(rows) for rows in _numbers(tune_rows, "--tune-rows")] if tune_rows else []
            done = measure_table(cases.tuning_plan(buckets), tune, budget=budget, say=say)
        else:
            plan = cases.goals_plan() if only == "goals" else cases.full_plan()
            done = work.run(plan, budget=budget, say=say, save=save)
    except (work.WrongResultError, TaskError, NoDeviceError) as error:
        console.print(f"refused: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if pictures is not None:
        for path in draw(pictures, done.timed, done.drifts, done.report.device):
            console.print(f"drawn: {path}", markup=False)
    _finish(done.report, json)


@bench.command("pass")
def whole_pass(
    library: Annotated[bool, typer.Option(help="Whether to run flash-linear-attention's model beside ours.")] = True,
    json: JsonOption = None,
) -> None:
    """Whole passes of the 1.47B model on a GPU, with floors and rivals; exits 1 if one is wrong or a goal is missed."""
    from specla.benchmarks.kernels.device import NoDeviceError
    from specla.benchmarks.target_pass import run as work
    from specla.benchmarks.target_pass.checks import WrongPassError

    console = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    def save(made: Report) -> None:
        if json is not None:
            made.write(json)

    try:
        made = work.run(say, save, with_library=library)
    except (WrongPassError, NoDeviceError) as error:
        console.print(f"refused: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    _finish(made, json)


def _finish(made: Report, json: Path | None) -> None:
    console = Console()
    made.show(console)
    if json is not None:
        made.write(json)
        console.print(f"written to {json}")
    if not made.all_met:
        raise typer.Exit(1)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
