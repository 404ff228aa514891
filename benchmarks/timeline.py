"""What one recovery is made of. Pure; knows a sample of ``recovery``, and draws nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOBODY_LOST = ("node-added", "worker-crash")
"""Cases in which there is no loss to learn of."""
WAIT, FORMING, UNSPLIT = "wait_for_loss", "forming", "wait_and_form"

Sample = Mapping[str, Any]


def timeline(sample: Sample) -> dict[str, float]:
    """Split a recovery into its parts, in order; they sum up to its ``total``.

    ``loss_known`` is when the backend had found the node lost: no world can form without it before
    that. Older files do not say it, and torch's ``etcd`` does not: the wait is then not told from
    the forming, unless nobody was lost.
    """
    re_forming, known = sample["re_forming"], sample.get("loss_known")
    if known is not None:
        stopped = sample["detection"] + sample["worker_stop"]
        waited = min(max(known - stopped, 0.0), re_forming)
        middle = {WAIT: waited, FORMING: re_forming - waited}
    else:
        middle = {FORMING if sample["case"] in NOBODY_LOST else UNSPLIT: re_forming}
    before, after = ("detection", "worker_stop"), ("worker_start", "first_step")
    return {
        **{name: sample[name] for name in before},
        **middle,
        **{name: sample[name] for name in after},
    }


def middle_run(samples: Sequence[Sample]) -> Sample | None:
    """Return the run with the median ``total`` (of two, the shorter); ``None`` if none recovered.

    The medians of the parts would sum up to no run that there was.
    """
    good = [sample for sample in samples if "failed" not in sample]
    good.sort(key=lambda sample: float(sample["total"]))
    return good[(len(good) - 1) // 2] if good else None
