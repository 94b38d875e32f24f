"""The collectives of DP + EP on the CPU: vLLM's CPU communicator selects the all-gather/reduce-scatter manager, and
that manager calls `all_gatherv` and `reduce_scatterv`, which the CPU communicator lacks."""

from collections.abc import Sequence

import torch
import torch.distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class RackplanCpuCommunicator(CpuCommunicator):
    """vLLM's CPU communicator and the two missing collectives, over Gloo."""

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Every rank's rows, in the order of ranks. `sizes`: rows per rank; None: as many as here. Only dim 0."""
        if dim != 0:
            raise NotImplementedError(f"all_gatherv over dim {dim}: only dim 0 is supported on CPU")
        if isinstance(input_, torch.Tensor):
            return self._gather_rows(input_, sizes)
        return [self._gather_rows(tensor, sizes) for tensor in input_]

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """This rank's part, along `dim`, of the sum over ranks. `sizes`: part of each rank; None: even parts."""
        total = input_.movedim(dim, 0).clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=self.device_group)
        parts = sizes or [total.shape[0] // self.world_size] * self.world_size
        begin = sum(parts[: self.rank_in_group])
        return total[begin : begin + parts[self.rank_in_group]].movedim(0, dim).contiguous()

    def _gather_rows(self, tensor: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
        """Gloo gathers equal shapes only: shorter parts are padded and cut again."""
        rows = list(sizes or [tensor.shape[0]] * self.world_size)
        padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in rows]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])
