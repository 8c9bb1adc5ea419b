"""The transport that a job names."""

from __future__ import annotations

from pathlib import Path

from headrace.job.schema.run import PublishSection
from services.trainer.control.rank_group import RankGroup
from services.trainer.control.transport.collective import CollectiveTransport
from services.trainer.control.transport.disk import DiskTransport
from services.trainer.control.transport.port import Transport
from services.trainer.devices.turns import Devices


def transport_of(
    config: PublishSection,
    ranks: RankGroup,
    root: Path,
    *,
    hashes: bool,
    devices: Devices,
    written: Path | None = None,
) -> Transport:
    """`root` is where versions lie that travel through files; `hashes` when ranks know what engines print.

    `written` is where the run notes its versions if other runs may write below `root`.
    """
    seconds = config.update_weight_timeout_seconds
    match config.update_weight_transport:
        case "collective":
            keeps = config.update_weight_rollback == "host"
            return CollectiveTransport(ranks, seconds=seconds, keeps=keeps, hashes=hashes)
        case "disk":
            return DiskTransport(ranks, root, devices, seconds=seconds, written=written)
        case "ipc":
            return DiskTransport(ranks, root, devices, seconds=seconds, in_memory=True)
