"""Put a run on a Prefect server."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
import yaml

from flows import temporary_server
from flows.commands.endings import errors_to_exit_codes, print_json, run_to_end
from flows.commands.options import DEFAULT_STORE, AcceptConfigChange, AsJson, Overrides, Source, Store
from flows.deployments.specs import DEFAULT_CRON, Placement, Schedule, as_prefect_yaml, deployment_specs
from flows.load_config import load_config


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
    with errors_to_exit_codes():
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

        done = run_to_end(put_all())
        if as_json:
            print_json([dataclasses.asdict(one) for one in done])
        else:
            typer.echo(f"Start an iteration: prefect deployment run mgrpo/{name} --watch")
