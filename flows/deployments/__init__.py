"""What `mgrpo deploy` puts on a Prefect server: work pools, deployments, and the automations that mark dead runs."""
