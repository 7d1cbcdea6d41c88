"""What a full batch is, where the source or `collate` makes the batches: by it a last batch that is short is told."""

from __future__ import annotations

from prefetchshard.base.errors import BatchError
from prefetchshard.planning.plan import HostPlan, Kind, Leaf


class FullRows:
    """The rows of the first batch of a run, and what the rows of a later one are.

    Args:
        rows: of the first batch, where the run goes on from a state.

    Attributes:
        rows: of the first batch; None where it is not known yet, or had none.
        is_seen: whether a batch of this run was seen.
    """

    def __init__(self, rows: int | None) -> None:
        self.rows = rows
        self.is_seen = False
        self._paths: frozenset[str] | None = None

    def told(self, plan: HostPlan, policy: str) -> HostPlan:
        """The plan of a batch with its rows: axis 0 of the leaves that the sharding splits, else what differs from the first batch.

        Args:
            plan: as the batch was read.
            policy: the remainder policy, for the error.

        Raises:
            BatchError: it cannot be told what the rows are.
        """
        if plan.splits_rows or plan.rows == self.rows is not None:
            return plan
        if plan.told is None:
            plan.told = self._tell(plan, policy)
        return plan.told

    def _tell(self, plan: HostPlan, policy: str) -> HostPlan:
        with_axis = [leaf for leaf in plan.leaves if leaf.kind is not Kind.HOST and leaf.shape]
        if self.rows is None:
            if plan.rows is None and (with_axis or policy == "pad"):
                raise _undecided(with_axis, policy)
            return plan
        known = [leaf for leaf in with_axis if self._paths is None or leaf.path in self._paths]
        rows = [leaf for leaf in known if leaf.shape[0] != self.rows] or known
        if len({leaf.shape[0] for leaf in rows}) != 1:
            raise _undecided(with_axis, policy)
        return plan if plan.rows == rows[0].shape[0] and len(rows) == len(with_axis) else plan.with_rows_of(rows)

    def see(self, rows: int | None, plan: HostPlan) -> None:
        """Note the first batch, with the rows with which it is placed."""
        self.is_seen = True
        self._paths = frozenset(leaf.path for leaf in plan.leaves)
        if self.rows is None:
            self.rows = rows


def too_few(rows: int, batch_size: int) -> str:
    """Why so many examples make no batch under "drop", and the ways out."""
    return (
        f"its {rows} rows are fewer than batch_size={batch_size}, and remainder='drop'; choose a smaller batch_size, keep them "
        f"(remainder='keep'), or fill them up under a mask (remainder='pad'). If this source batches already, leave batch_size out, or "
        f"rebatch it (ps.rebatch)"
    )


def _undecided(leaves: list[Leaf], policy: str) -> BatchError:
    sizes = {leaf.path or "(the batch itself)": leaf.shape[0] for leaf in leaves}
    what = f"axis 0 of its leaves is {sizes}" if sizes else "none of its leaves has an axis"
    return BatchError(
        f"remainder={policy!r} has to know the rows of a batch, and it cannot be told which leaves have them: {what}. Say it with the "
        f"sharding: PartitionSpec('data') for leaves with rows, PartitionSpec() for others; or let batches come as they are "
        f"(remainder='keep')"
    )
