"""The short sequence that every engine is asked about after a publication, before its weights are served."""

from __future__ import annotations

import numpy as np

from headrace.trajectory import Sample, Status

LENGTH = 16
_STRIDE = 7919  # a prime: ids from all over the vocabulary


def probe_sample(vocab_size: int) -> Sample:
    """One token of prompt, the others as its response."""
    tokens = np.arange(1, LENGTH + 1, dtype=np.int64) * _STRIDE % vocab_size
    return Sample(
        sample_id="probe",
        group_id="probe",
        index=0,
        prompt="",
        response="",
        tokens=tokens.astype(np.int32),
        loss_mask=np.ones(LENGTH - 1, dtype=np.uint8),
        rollout_log_probs=np.zeros(LENGTH - 1, dtype=np.float32),
        status=Status.COMPLETED,
    )
