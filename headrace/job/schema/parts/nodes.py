"""Options of a trainer whose machines each start their own ranks, under the names that torchrun gives them."""

from __future__ import annotations

from pydantic import Field

from headrace.job.schema.section import NonNegative, Port, Section


class NodeOptions(Section):
    node_rank: NonNegative | None = Field(
        None,
        description="Which of actor_num_nodes machines this one is, where each starts its own ranks with `headrace up "
        "trainer`; 0 serves and runs the training loop. Absent: NODE_RANK, or 0.",
    )
    master_addr: str | None = Field(
        None, description="Host or address of machine 0, where ranks of several machines meet. Absent: MASTER_ADDR."
    )
    master_port: Port | None = Field(
        None, description="Port at which they meet; free on machine 0. Absent: MASTER_PORT, or 29500."
    )
