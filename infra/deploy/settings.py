"""Settings of the services around mgrpo, the same for `mgrpo up`, the compose file and `mgrpo deploy`."""

BUCKET = "mgrpo"
STORE = f"s3://{BUCKET}/runs"
UPDATE_FLOW = "mgrpo-policy-update"
"""The flow whose deployments, one a policy, an iteration dispatches its updates to."""

EVERYWHERE = {
    "DO_NOT_TRACK": "1",
}
PREFECT_SERVER = {
    **EVERYWHERE,
    # Leases in memory are lost with the server: runs under a concurrency limit then crash and leak their slot.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # The default vacuums events only and keeps flow runs for ever.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
}
S3_CLIENT = {
    "AWS_DEFAULT_REGION": "us-east-1",
    # Without keys of its own botocore asks the cloud's metadata service, and waits for it.
    "AWS_EC2_METADATA_DISABLED": "true",
}
HEARTBEAT_S = 30
"""A run without a sign of life for three of these is taken for dead. Prefect's default is 180."""
PREFECT_RUN = {
    **EVERYWHERE,
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
    # A server that restarts, or whose database is away (500), is asked again for four minutes instead of one.
    "PREFECT_CLIENT_MAX_RETRIES": "7",
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "mgrpo_core,infra,tasks",
    # These loggers also speak outside of runs, where there is no run to send their lines to.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of every run, whatever its worker's is."""
PREFECT_WORKER = {
    **PREFECT_RUN,
    "PREFECT_WORKER_QUERY_SECONDS": "2",  # default 10: an update would wait that long for its worker
}
MLFLOW_SERVER = {
    **EVERYWHERE,
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Otherwise ten processes of 245 MB each wait for jobs that mgrpo never sends.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
