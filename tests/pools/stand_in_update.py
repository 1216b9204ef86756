"""The flow `mgrpo-policy-update` as the tests deploy it: the real update, which can be held, failed or killed first.

The folder named by the environment says how: a file `hold`, `fail` or `kill` there, while it exists. Every start of an
update adds a line to `starts`, every one that trained a line to `updates`.
"""

import asyncio
import os
import signal
from pathlib import Path

from prefect import flow

from flows.policy_update import _flow_run_name
from infra.training.orders import UpdateOrder

FOLDER = "MGRPO_TEST_FOLDER"


@flow(name="mgrpo-policy-update", flow_run_name=_flow_run_name)
async def policy_update(order: UpdateOrder, store: str) -> dict[str, float]:
    import infra.training.policy_update as update  # as late as the real flow does
    from tasks.run_update import run_update

    folder = Path(os.environ[FOLDER])
    _note(folder / "starts", f"{order.policy} {os.getpid()}")
    while (folder / "hold").exists():  # noqa: ASYNC110 (another process decides)
        await asyncio.sleep(0.1)
    if (folder / "fail").exists():
        raise RuntimeError(f"planted failure of policy {order.policy}")
    if (folder / "kill").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    real = update.train_policy

    def counted(*args: object, **kwargs: object) -> object:
        figures = real(*args, **kwargs)  # type: ignore[arg-type]
        _note(folder / "updates", order.policy)
        return figures

    update.train_policy = counted  # type: ignore[assignment]
    return await run_update(order, store)


def _note(file: Path, line: str) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(f"{line}\n")
