"""What backends may use of TorchScript: the switch of its oneDNN Graph fuser."""

from fusewright._torch_compat import onednn_fusion

__all__ = ["onednn_fusion"]
