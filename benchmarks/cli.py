"""`specla bench`: every figure of the documents comes from one of these commands."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from specla.benchmarks import gpu_commands
from specla.benchmarks.options import (
    ALL_DRAFTERS,
    MOST_TOKENS,
    DraftersOption,
    JsonOption,
    ThreadsOption,
    drafters_of,
    finish,
    folder_of,
    integers,
    progress_bar,
    temperatures_of,
)
from specla.benchmarks.prompt_set import HELD_OUT
from specla.benchmarks.report import Report, commit, cpu_name, too_few
from specla.verifier_service.config import MAX_ROWS

NUMERICS: tuple[Literal["exact", "fast"], ...] = ("exact", "fast")


bench = typer.Typer(help="Measure speed, identity and acceptance.", no_args_is_help=True)

TargetOption = Annotated[Path | None, typer.Option(envvar="SPECLA_TARGET", help="Checkpoint; default: shipped.")]
PromptsOption = Annotated[Path, typer.Option(help="JSON lines of {id, domain, text}.")]
NumericsOption = Annotated[Literal["exact", "fast"], typer.Option(help="Kind of arithmetic.")]
DeviceOption = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the target runs.")]


@bench.command()
def identity(
    target: TargetOption = None,
    drafters: DraftersOption = ALL_DRAFTERS,
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1",
    joins: Annotated[str, typer.Option(help="Separated by commas.")] = "one process,services",
    prompts: PromptsOption = HELD_OUT,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS)] = 128,
    batch: Annotated[int, typer.Option(min=1, max=65536, help="Sessions at a time.")] = 16,
    baseline_batch: Annotated[int, typer.Option(min=1, max=65536, help="Sessions at a time of the baseline.")] = 1,
    max_nodes: Annotated[int, typer.Option(min=1, max=128, help="Candidates of one draft.")] = 4,
    numerics: NumericsOption = "exact",
    device: DeviceOption = "cpu",
    journal: Annotated[Path, typer.Option(help="Texts so far; an existing one is gone on with.")] = Path(
        "runs/identity.jsonl"
    ),
    json: JsonOption = None,
) -> None:
    """The same tokens for a seed, whatever drafts, however joined; exits 1 if a text differs.

    Every draft is verified, whatever it costs, so that worthless ones count too.
    """
    names = drafters_of(drafters, "--drafters")
    degrees = temperatures_of(temperatures, "--temperatures")
    joined = [join.strip() for join in joins.split(",")]
    if unknown := [join for join in joined if join not in ("one process", "services")]:
        raise typer.BadParameter(f"no join is called {unknown[0]!r}", param_hint="--joins")
    from specla.benchmarks import identity as work
    from specla.benchmarks.prompt_set import load
    from specla.benchmarks.services import services
    from specla.client.local import Local
    from specla.drafter_service.config import DrafterConfig
    from specla.verifier_service.config import VerifierConfig

    folder = folder_of(target)
    columns = work.cases(names, degrees, joined, batch, baseline_batch)
    chosen = load(prompts, limit=limit)
    settings = work.settings_of(
        chosen,
        numerics=numerics,
        device=device,
        max_tokens=max_tokens,
        max_nodes=max_nodes,
        target=work.digest_of(folder),
        commit=commit(),
    )
    try:
        texts = work.Journal(journal, settings)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--journal") from None
    wanted = {prompt.id for prompt in chosen}
    done = sum(len(wanted & set(texts.of(case))) for case in columns)
    drafting = [name for name in names if name != "none"]
    with ExitStack() as stack, progress_bar() as progress:
        task = progress.add_task("texts", total=len(columns) * len(chosen), completed=done)
        generators: dict[str, work.Generator] = {}

        def generator_of(join: str) -> work.Generator:
            if join not in generators:
                if join == "one process":
                    config = VerifierConfig(
                        target=folder,
                        device=device,
                        numerics=numerics,
                        max_sessions=max(batch, baseline_batch),
                        drafting="unconditional",
                    )
                    generators[join] = stack.enter_context(
                        Local(
                            verifier=config,
                            drafters=[replace(one, max_nodes=max_nodes) for one in DrafterConfig.of_names(drafting)],
                        )
                    )
                else:
                    generators[join] = stack.enter_context(
                        services(
                            folder,
                            drafting,
                            verifier_options=[
                                f"--device={device}",
                                f"--numerics={numerics}",
                                f"--max-sessions={batch}",
                                "--drafting=unconditional",
                            ],
                            drafter_options=[f"--max-nodes={max_nodes}"],
                        )
                    )
            return generators[join]

        work.run(columns, chosen, texts, generator_of, max_tokens=max_tokens, progress=lambda _: progress.advance(task))
    made = work.report(columns, chosen, texts, device=_name_of(device))
    if done:
        made.notes["texts of a former run, from the journal"] = done
    finish(made, json)


@bench.command()
def drafters(
    target: TargetOption = None,
    names: DraftersOption = "none,lookup,suffix",
    prompts: PromptsOption = HELD_OUT,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 12,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS)] = 192,
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0,0.7,1",
    at_once: Annotated[int, typer.Option(min=1, max=256, help="Texts at a time.")] = 1,
    numerics: NumericsOption = "exact",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 0,
    json: JsonOption = None,
) -> None:
    """Each drafter against plain decoding, on code that repeats itself and on prose; exits 1 if a goal is missed."""
    all_names = drafters_of(names, "--names")
    degrees_asked = temperatures_of(temperatures, "--temperatures")
    from specla.benchmarks import drafters as work
    from specla.benchmarks.prompt_set import load
    from specla.client.local import Local
    from specla.verifier_service.config import VerifierConfig

    folder = folder_of(target)
    prompts_of = {domain: load(prompts, domain=domain, limit=limit) for domain in (work.REPEATING, work.PROSE)}
    sessions = max(VerifierConfig.max_sessions, at_once)
    config = VerifierConfig(target=folder, device=device, numerics=numerics, threads=threads, max_sessions=sessions)
    with (
        Local(verifier=config, drafters=[n for n in all_names if n != "none"]) as local,
        progress_bar() as progress,
    ):
        together = f", {at_once} texts at a time" if at_once > 1 else ""
        made = Report(title=f"Drafters over plain decoding{together}", device=_name_of(device))
        made.unjudged = too_few(min(map(len, prompts_of.values())), work.LEAST_PROMPTS, " of each kind")
        made.notes.update(temperatures=temperatures, max_tokens=max_tokens, rounds=rounds, numerics=numerics)
        made.notes["numerics_id"] = local.model().numerics_id
        work.warm_up(local, all_names)
        for degrees in degrees_asked:
            ratios = {}
            for domain, chosen in prompts_of.items():
                case = f"{domain}, T = {degrees:g}"
                task = progress.add_task(case, total=rounds * len(all_names) * work.samples_of(len(chosen), at_once))
                timed = work.measure(
                    local,
                    chosen,
                    all_names,
                    rounds=rounds,
                    max_tokens=max_tokens,
                    temperature=degrees,
                    at_once=at_once,
                    progress=lambda task=task: progress.advance(task),  # type: ignore[misc]
                )
                ratios[domain] = work.add_rows(made, case, timed)
            work.add_goals(made, degrees, ratios[work.REPEATING], ratios[work.PROSE])
    finish(made, json)


@bench.command()
def price(
    target: TargetOption = None,
    drafters: DraftersOption = "none,suffix",
    prompts: PromptsOption = HELD_OUT,
    limit: Annotated[int, typer.Option(min=2, help="Prompts, of all kinds.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS)] = 128,
    json: JsonOption = None,
) -> None:
    """Exact numerics over fast, whole texts through services; exits 1 if exact costs more than a default may."""
    names = drafters_of(drafters, "--drafters")
    from specla.benchmarks import price as work
    from specla.benchmarks.identity import Generator
    from specla.benchmarks.prompt_set import load
    from specla.benchmarks.services import services

    folder = folder_of(target)
    chosen = load(prompts, limit=limit)
    made = Report(title="Exact numerics over fast, end to end", device=cpu_name())
    made.unjudged = too_few(len(chosen), work.LEAST_PROMPTS)
    made.notes.update(max_tokens=max_tokens, prompts=len(chosen), temperature=0.0)
    with ExitStack() as stack, progress_bar() as progress:
        task = progress.add_task("texts", total=2 * len(chosen) * len(names))
        generators: dict[str, Generator] = {
            numerics: stack.enter_context(services(folder, names, verifier_options=[f"--numerics={numerics}"]))
            for numerics in NUMERICS
        }
        for generator in generators.values():
            generator.generate("warm up", drafter="none", max_tokens=4, temperature=0.0, seed=0)
        taken = work.measure(generators, chosen, names, max_tokens=max_tokens, progress=lambda: progress.advance(task))
    work.add_to(made, taken)
    finish(made, json)


@bench.command()
def passes(
    target: TargetOption = None,
    rows: Annotated[str, typer.Option(help="Rows of a pass, root included; separated by commas.")] = "2,5,9,17",
    rounds: Annotated[int, typer.Option(min=4)] = 60,
    threads: ThreadsOption = 0,
    json: JsonOption = None,
) -> None:
    """Verification passes of several sizes over plain decoding, in both numerics; exits 1 if a goal is missed."""
    counts = integers(rows, "--rows", 1, MAX_ROWS)
    from specla.benchmarks import passes as work
    from specla.benchmarks.prompt_set import load
    from specla.client.tokenizer import Tokenizer
    from specla.verifier_service.config import VerifierConfig
    from specla.verifier_service.engine import Engine

    folder = folder_of(target)
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
    with progress_bar() as progress:
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
    finish(made, json)


@bench.command()
def numerics(
    target: TargetOption = None,
    prompts: PromptsOption = HELD_OUT,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only so many texts.")] = None,
    rows: Annotated[int, typer.Option(min=1, max=64, help="Rows of a pass.")] = 16,
    device: DeviceOption = "cpu",
    json: JsonOption = None,
) -> None:
    """How often fast numerics choose another token than exact ones, and how near a tie exact decoding was there."""
    from specla.benchmarks import numerics as work
    from specla.benchmarks.prompt_set import load
    from specla.client.tokenizer import Tokenizer
    from specla.verifier_service.config import VerifierConfig
    from specla.verifier_service.engine import Engine

    folder = folder_of(target)
    tokenizer = Tokenizer.load(folder)
    texts = [tokenizer.encode(prompt.text) for prompt in load(prompts, limit=limit)]
    exact, fast = (
        Engine(VerifierConfig(target=folder, device=device, numerics=mode, max_sessions=1, max_rows=rows))
        for mode in NUMERICS
    )
    made = Report(title="Fast numerics against exact ones", device=_name_of(device))
    made.notes.update({"numerics_id, exact": exact.target.numerics_id, "numerics_id, fast": fast.target.numerics_id})
    made.notes["rows of a pass"] = rows
    with progress_bar() as progress:
        task = progress.add_task("texts", total=len(texts))
        found = work.differences(exact, fast, texts, rows, lambda: progress.advance(task))
    work.add_to(made, found, sum(map(len, texts)))
    finish(made, json)


def _name_of(device: Literal["cpu", "cuda"]) -> str:
    """What a report calls it."""
    from specla.benchmarks.kernels.device import describe

    return describe() if device == "cuda" else cpu_name()


bench.command("kernels")(gpu_commands.kernels)
bench.command("pass")(gpu_commands.whole_pass)
