"""Check a config, train a run, evaluate it."""

from pathlib import Path
from typing import Annotated

import typer
import yaml

from flows import temporary_server
from flows.commands.endings import errors_to_exit_codes, print_json, run_to_end
from flows.commands.options import DEFAULT_STORE, AcceptConfigChange, AsJson, Overrides, RunName, Source, Store
from flows.load_config import load_config


def check(source: Source, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the resolved config, every default filled in, and stop. Exit code 2 if it cannot be run."""
    with errors_to_exit_codes():
        config = load_config(source, overrides or [])
        resolved = config.model_dump(mode="json")
        if as_json:
            print_json(resolved)
        else:
            typer.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True, width=120), nl=False)


def train(
    source: Source,
    iterations: Annotated[
        int | None, typer.Option("--iterations", min=1, help="Iterations the run shall have in the end.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Name of the run; default: the config's name.")] = None,
    store: Store = DEFAULT_STORE,
    seed: Annotated[int | None, typer.Option("--seed", min=0)] = None,
    overrides: Overrides = None,
    accept_config_change: AcceptConfigChange = False,
    as_json: AsJson = False,
) -> None:
    """Train a run until it has all its iterations; a run that exists is continued where it stopped."""
    with errors_to_exit_codes():
        settings = list(overrides or [])
        settings += [f"seed={seed}"] if seed is not None else []
        settings += [f"iterations={iterations}"] if iterations is not None else []
        config = load_config(source, settings)
        temporary_server.prepare()
        from flows.train_run import train_run

        done = run_to_end(
            train_run(
                config,
                run=run or Path(source).stem,
                store=store,
                accept_config_change=accept_config_change,
                quiet=as_json,
            )
        )
        if as_json:
            print_json(done.to_json())
        else:
            for line in done.closing_lines():
                typer.echo(line)


def evaluate(
    run: RunName,
    iteration: Annotated[
        int | None,
        typer.Option("--iteration", min=0, help="After how many iterations; default: the newest. 0 = the start."),
    ] = None,
    store: Store = DEFAULT_STORE,
    questions: Annotated[
        int | None, typer.Option("--questions", min=1, help="Held-out questions; default: the config's.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Answers a question at the temperature.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Success on the held-out questions, sampled and greedy, with a confidence interval."""
    with errors_to_exit_codes():
        temporary_server.prepare()
        from flows.evaluation import evaluate_run

        result = run_to_end(
            evaluate_run(run=run, store=store, after=iteration, questions=questions, samples=samples, quiet=as_json)
        )
        if as_json:
            print_json(result.to_json())
        else:
            for line in result.lines():
                typer.echo(line)
