"""What `mgrpo deploy` puts on a Prefect server: work pools, deployments, and the automation that marks dead runs."""
