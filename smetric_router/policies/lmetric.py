"""`lmetric`: what is left to compute, times the load."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from smetric_router.policies.base import least_loaded, lowest, new_tokens
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView


@dataclass(frozen=True, slots=True)
class LMetric:
    """A product, so that there is no weight to tune (LMetric, arXiv:2603.15202); ties round-robin.

        form = "paper":    argmin (L - c) * l
        form = "authors":  argmin (queued prefill + L - c) * (l + 1), as the authors' code has it

    The paper's form does not tell idle instances apart, whatever they hold; the authors' does. Doubling the prompt with all
    hits (and what is queued) changes neither, doubling every load not the paper's.

    Inputs: per instance the hit length c, the requests in flight l, and the prompt tokens not computed yet; L. A request
    without a prompt goes to the least loaded.

    Reasons: `lmetric`, `no-prompt`.

        policy = "lmetric"
        [policies.lmetric]
        form = "authors"
    """

    name: ClassVar[str] = "lmetric"

    form: Literal["paper", "authors"] = "paper"

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Choose the least product."""
        if not request.length:
            return least_loaded(view, "no-prompt")
        new = new_tokens(request, view)
        if self.form == "paper":
            return lowest(view, new * view.load, "lmetric")
        return lowest(view, (view.pending + new) * (view.load + 1), "lmetric")
