"""The worker plugin as it travels: by value, and never in the way of a worker without dtrain.

A plugin class pickled by reference would keep every worker that cannot import dtrain from
starting.  This one imports nothing of dtrain until its ``setup``, and its ``setup`` never
raises: it says hello, or says what is wrong.
"""

from __future__ import annotations

from typing import Any

#: The name under which both plugins are registered.
NAME = "dtrain"


def worker_plugin() -> Any:
    """An instance of a class that pickles by value (it is made in here)."""
    from distributed.diagnostics.plugin import WorkerPlugin

    class DTrainWorkerPlugin(WorkerPlugin):
        name = "dtrain"

        def __init__(self) -> None:
            self.service: Any = None

        async def setup(self, worker: Any) -> None:
            import asyncio

            try:
                from dtrain.runtime.worker import WorkerService

                self.service = WorkerService(worker)
                await self.service.open()
            except Exception as error:  # noqa: BLE001 - told to the master in words
                try:
                    await asyncio.wait_for(
                        worker.scheduler.dtrain_hello(
                            address=worker.address,
                            version=None,
                            problem=f"{type(error).__name__}: {error}",
                        ),
                        10,
                    )
                except Exception as second:  # noqa: BLE001 - all that is left is the log
                    import logging

                    logging.getLogger("distributed.worker").warning(
                        "dtrain: %s; and the scheduler could not be told: %s", error, second
                    )

        async def teardown(self, worker: Any) -> None:
            if self.service is not None:
                await self.service.close()

    return DTrainWorkerPlugin()
