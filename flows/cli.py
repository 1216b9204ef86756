"""The command `mgrpo`. Heavy imports wait until a command needs them."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml

from flows import temporary_server
from flows.deployments.specs import DEFAULT_CRON, Placement, Schedule, as_prefect_yaml, deployment_specs
from flows.load_config import load_config, preset_names
from infra.deploy.local.settings import Database
from infra.replay.verdicts import Through
from mgrpo_core.errors import ConfigError, DatasetError, MGRPOError, ShapeError, StoreError, TemplateError

app = typer.Typer(
    name="mgrpo",
    help="Train a team of LLM agents with M-GRPO: rollouts, Parquet audit log, alignment, one update per policy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

T = TypeVar("T")

_INTERRUPTED = "Interrupted. What is staged or committed is kept; the same command continues."

# Wrong input is refused with 2 before work starts; work that fails ends with 1.
_BAD_INPUT = (ConfigError, DatasetError, TemplateError, StoreError, ShapeError)

Source = Annotated[str, typer.Argument(help=f"A preset ({', '.join(preset_names())}) or a YAML file.")]
RunName = Annotated[str, typer.Argument(help="Name of the run.")]
Store = Annotated[
    str, typer.Option("--store", envvar="MGRPO_STORE", help="Where runs are kept: a folder or an fsspec URL.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, e.g. --set loss.clip_low=0.1; may be repeated.")
]
AcceptConfigChange = Annotated[
    bool, typer.Option("--accept-config-change", help="Continue a run although its config was another so far.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
DEFAULT_STORE = "mgrpo-store"
Home = Annotated[Path, typer.Option("--home", help="Folder for logs, data and keys of the local services.")]
DEFAULT_HOME = Path("mgrpo-out/up")


@contextmanager
def _errors_to_exit_codes(interrupted: str = _INTERRUPTED) -> Iterator[None]:
    try:
        yield
    except _BAD_INPUT as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
    except MGRPOError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.secho(interrupted, err=True)
        raise typer.Exit(130) from None
    except SystemExit as stopped:  # SIGTERM
        typer.secho(interrupted, err=True)
        raise typer.Exit(int(stopped.code or 0)) from None


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end. During a flow run Prefect turns SIGTERM into an exception of its own; it is SystemExit again."""
    from prefect.exceptions import TerminationSignal

    try:
        return asyncio.run(work)
    except TerminationSignal as stopped:
        raise SystemExit(128 + stopped.signal) from None


@app.command()
def check(source: Source, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the resolved config, every default filled in, and stop. Exit code 2 if it cannot be run."""
    with _errors_to_exit_codes():
        config = load_config(source, overrides or [])
        resolved = config.model_dump(mode="json")
        if as_json:
            _print_json(resolved)
        else:
            typer.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True, width=120), nl=False)


@app.command()
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
    with _errors_to_exit_codes():
        settings = list(overrides or [])
        settings += [f"seed={seed}"] if seed is not None else []
        settings += [f"iterations={iterations}"] if iterations is not None else []
        config = load_config(source, settings)
        temporary_server.prepare()
        from flows.train import train_run

        done = _run(
            train_run(
                config,
                run=run or Path(source).stem,
                store=store,
                accept_config_change=accept_config_change,
                quiet=as_json,
            )
        )
        if as_json:
            _print_json(done.to_json())
        else:
            for line in done.closing_lines():
                typer.echo(line)


@app.command()
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
    with _errors_to_exit_codes():
        temporary_server.prepare()
        from flows.evaluate import evaluate_run

        result = _run(
            evaluate_run(run=run, store=store, after=iteration, questions=questions, samples=samples, quiet=as_json)
        )
        if as_json:
            _print_json(result.to_json())
        else:
            for line in result.lines():
                typer.echo(line)


@app.command()
def deploy(
    source: Source,
    run: Annotated[str | None, typer.Option("--run", help="Name of the run; default: the config's name.")] = None,
    store: Store = DEFAULT_STORE,
    name: Annotated[str, typer.Option("--name", help="Of the deployment: mgrpo/NAME.")] = "iteration",
    cron: Annotated[str, typer.Option("--cron", help="When iterations start by themselves, in UTC.")] = DEFAULT_CRON,
    active: Annotated[bool, typer.Option("--active", help="Switch the schedule on, if it is new.")] = False,
    overrides: Overrides = None,
    accept_config_change: AcceptConfigChange = False,
    prefect_yaml: Annotated[
        bool, typer.Option("--prefect-yaml", help="Print the deployments as a prefect.yaml, and do nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put a run's work pools, deployments and schedule on the Prefect server. Done again, it changes nothing."""
    with _errors_to_exit_codes():
        config = load_config(source, ["execution.mode=work_pools", *(overrides or [])])
        placement = Placement(run or Path(source).stem, store, name, Schedule(cron, active))
        if prefect_yaml:
            specs = as_prefect_yaml(deployment_specs(config, placement))
            typer.echo(yaml.safe_dump(specs, sort_keys=False, width=120), nl=False)
            return
        temporary_server.prepare()
        from flows.deployments.deploy import Deployed, deploy_run

        async def put_all() -> list[Deployed]:
            done = []
            async for one in deploy_run(config, placement, accept_config_change=accept_config_change):
                done.append(one)
                if not as_json:
                    typer.echo(f"{one.kind:<11} {one.name:<40} {one.done}")
            return done

        done = _run(put_all())
        if as_json:
            _print_json([dataclasses.asdict(one) for one in done])
        else:
            typer.echo(f"Start an iteration: prefect deployment run mgrpo/{name} --watch")


@app.command()
def up(
    source: Annotated[str, typer.Argument(help="The preset or YAML file whose work pools get workers.")] = "quickstart",
    home: Home = DEFAULT_HOME,
    detach: Annotated[bool, typer.Option("--detach", help="Leave them running; `mgrpo down` stops them.")] = False,
    only: Annotated[str | None, typer.Option("--only", help="Of server, s3 and mlflow, with commas between.")] = None,
    no_workers: Annotated[bool, typer.Option("--no-workers", help="Start no workers.")] = False,
    database: Annotated[Database, typer.Option("--database", help="Of the Prefect server.")] = "postgres",
    server_port: Annotated[int, typer.Option("--server-port", help="Of the Prefect server; 0 = any free.")] = 4200,
    s3_port: Annotated[int, typer.Option("--s3-port", help="Of the S3 server.")] = 8333,
    mlflow_port: Annotated[int, typer.Option("--mlflow-port", help="Of the MLflow server.")] = 5000,
    postgres_port: Annotated[int, typer.Option("--postgres-port", help="Of PostgreSQL.")] = 54320,
    overrides: Overrides = None,
) -> None:
    """Start what a run on work pools needs, on this machine: Prefect and its database, S3, MLflow, a worker per pool.

    Ctrl-C (exit code 130) and SIGTERM (143) stop all of it; so does `mgrpo down`.
    """
    with _errors_to_exit_codes(interrupted="All stopped."):
        from flows.up import local_settings, start

        settings = local_settings(
            load_config(source, overrides or []),
            only=only,
            workers=not no_workers,
            database=database,
            ports=(server_port, s3_port, mlflow_port, postgres_port),
        )
        start(home, settings, detach=detach)


@app.command()
def down(home: Home = DEFAULT_HOME) -> None:
    """Stop what `mgrpo up` started, and keep its data."""
    with _errors_to_exit_codes(interrupted="All stopped."):
        from flows.up import stop

        stop(home)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    policy: Annotated[str, typer.Argument(help="Name of the policy.")],
    run: Annotated[str, typer.Option("--run", help="Name of the run.")],
    store: Store = DEFAULT_STORE,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="Of the policy; default: the newest committed.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Whoever reaches it can change the weights.")
    ] = "127.0.0.1",
    python: Annotated[
        Path | None,
        typer.Option("--python", envvar="MGRPO_VLLM_PYTHON", help="Of vLLM's environment; default: .venv-vllm here."),
    ] = None,
    cache: Annotated[Path, typer.Option("--cache", help="Folder for weights that vLLM cannot read from the store.")] = (
        Path("mgrpo-out/policies")
    ),
) -> None:
    """Serve a policy version with vLLM, for the config's `policies.POLICY.servers`. `make vllm` installs it.

    Options that are not named here go to vLLM's server: `mgrpo serve main --run r --tensor-parallel-size 4`.
    SIGINT and SIGTERM are handed to the server, whose exit code is the command's.
    """
    with _errors_to_exit_codes():
        from flows.serve import Serving, serve_policy

        serving = Serving(policy, run, store, version, host, port, python, cache, tuple(context.args))
        code = serve_policy(serving, lambda line: typer.secho(line, err=True))
    raise typer.Exit(code)


@app.command()
def runs(store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """List the runs of a store: iterations, policy versions, last commit."""
    with _errors_to_exit_codes():
        from flows.runs import list_runs, render_runs

        found = list_runs(store)
        if as_json:
            _print_json(found)
        else:
            render_runs(found)


@app.command()
def verify(run: RunName, store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Check every file, row and link of a run against its manifests. Exit code 1 if anything is wrong."""
    with _errors_to_exit_codes():
        from flows.runs import render_verification, verification_of

        report = verification_of(store, run)
        if as_json:
            _print_json(report)
        else:
            render_verification(report)
        if not report["sound"]:
            raise typer.Exit(1)


@app.command()
def replay(
    run: RunName,
    iteration: Annotated[int, typer.Argument(min=0, help="Number of a committed iteration.")],
    store: Store = DEFAULT_STORE,
    through: Annotated[
        Through, typer.Option("--through", help="The last stage; `advantages` needs no model.")
    ] = "update",
    what_if: Annotated[
        list[str] | None,
        typer.Option("--set", help="What if: key=value, e.g. --set alignment.d=[2,4]; may be repeated, lists a grid."),
    ] = None,
    grid: Annotated[list[str] | None, typer.Option("--grid", help="The same, as key=a,b.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="File for a PNG of what would change.")] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute an iteration from the store and compare, to the bit. Exit code 1 if anything differs.

    With --set or --grid: what it would have been under other settings, beside what it was. Nothing is written into the
    run.
    """
    with _errors_to_exit_codes(interrupted="Interrupted. A replay changes nothing."):
        settings = [*(what_if or []), *(_as_list(one) for one in grid or [])]
        if settings:
            from infra.replay.what_if import what_if_stored

            found = what_if_stored(store, run, iteration, settings, through)
            if picture is not None:
                from infra.replay.what_if_picture import what_if_png

                try:
                    picture.write_bytes(what_if_png(found))
                except OSError as error:
                    raise ConfigError(f"--picture {picture}: cannot be written ({error}). Give another file.") from None
            if as_json:
                _print_json(found.to_json())
            else:
                from infra.replay.render_what_if import render_what_if

                render_what_if(found)
            return
        if picture is not None:
            raise ConfigError("--picture: there is nothing to draw without --set or --grid. Give one.")
        from infra.replay.iteration import replay_stored
        from infra.replay.render import render_replay

        report = replay_stored(store, run, iteration, through)
        if as_json:
            _print_json(report.to_json())
        else:
            render_replay(report)
        if not report.equal:
            raise typer.Exit(1)


def _as_list(setting: str) -> str:
    """`key=a,b` as `key=[a, b]`."""
    key, equals, values = setting.partition("=")
    return f"{key}{equals}[{values}]" if equals else setting


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, allow_nan=False, ensure_ascii=False)
    sys.stdout.write("\n")


if __name__ == "__main__":
    app()
